#pragma once
#include <cstdint>

#include "device/ptx/async_copy.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/sm90/mma/multiply_promoted.cuh"
#include "device/sm90/stages.cuh"

// How the warps of a quantized layer go through the stages of its e4m3 GEMMs. The accumulators leave a math
// warp some ten registers, so what it can recompute for a k-block, or read from shared memory, it does.
namespace mega_moe::device::sm90 {

// A DeferredSignal in fewer registers: the index of one counter instead of the addresses of two.
template <class C>
struct IndexedDeferredSignal {
    static constexpr std::int32_t kNone = -1;

    std::uint32_t* counters;
    std::int32_t counter = kNone;

    __device__ __forceinline__ explicit IndexedDeferredSignal(std::uint32_t* all_counters)
        : counters(all_counters) {}

    // By one warp. It waits for this warp's stores alone: wgmma keeps the warps of a warpgroup in step, and
    // a warp that waited for another here could deadlock.
    __device__ __forceinline__ void publish(int lane) {
        if constexpr (C::kQuantizesOnArrival) {
            // Fences dz, which ordinary stores write and TMA reads. Here rather than behind the stores, since
            // they are through by now.
            if (counter >= 0) ptx::fence_proxy_async_global();
            __syncwarp();
        }
        if (counter >= 0 && lane == 0) {
            ptx::bulk_wait<0>();
            ptx::add_release_gpu(counters + counter, 1);
        }
        counter = kNone;
    }
    // Signals what has just been stored, once it is written; two counters at most.
    __device__ __forceinline__ void defer(const std::uint32_t* which, const std::uint32_t* also, int lane) {
        publish(lane);
        if (also != nullptr) {
            counter = static_cast<std::int32_t>(also - counters);
            publish(lane);
        }
        if (which != nullptr) counter = static_cast<std::int32_t>(which - counters);
    }
    // Before a wait that may depend on it, if only by way of other CTAs.
    __device__ __forceinline__ void wait(std::uint32_t barrier, std::uint32_t parity, int lane) {
        if (counter >= 0 && !ptx::mbarrier_test(barrier, parity)) publish(lane);
        ptx::mbarrier_wait(barrier, parity);
    }
};

// The loading thread: scale factors of a stage's first and second 128 columns, which arrive at its barrier.
template <class C>
__device__ __forceinline__ void load_column_scales(const Smem<C>& shared, int stage, const float* first,
                                                   const float* second) {
    const std::uint32_t to = shared.column_scales(stage);
    ptx::copy_word_async(to, first);
    ptx::copy_word_async(to + 4, second);
    ptx::arrive_after_copies(shared.full(stage));
}

// A tile's stages as multiply_blocks takes them, for one warp.
//   RowScales: std::uint32_t operator()(int stage, int k_block), shared address of the scale factor of the
//   tile's first row; kStride, bytes to the next row's
template <class C, class RowScales, class Operands>
struct QuantizedStages {
    using Stored = Operands;
    const Smem<C>& shared;
    RingCursor<C::kStages>& stage;  // the next that is opened
    IndexedDeferredSignal<C>& signal;
    RowScales row_scales;
    int warpgroup;
    int lane;
    int k_block = 0;

    __device__ __forceinline__ StageOperands open() {
        ptx::mbarrier_wait(shared.full(stage.at), stage.parity);
        const std::uint32_t rows =
            shared.a(stage.at) + static_cast<std::uint32_t>(warpgroup * Stored::kWarpgroupBytes);
        const StageOperands at{Stored::low(rows), Stored::low(shared.b(stage.at))};
        stage.next();
        return at;
    }
    __device__ __forceinline__ BlockScales scales() {
        const int at = opened(1);
        const std::uint32_t thread = ptx::thread_id() - 128;
        const std::uint32_t row = thread / 32 * 16 + thread % 32 / 4;  // the thread's first one
        const std::uint32_t from = row_scales(at, k_block) + row * RowScales::kStride;
        const std::uint32_t columns = shared.column_scales(at);
        const BlockScales s{{ptx::load_shared(from), ptx::load_shared(from + 8 * RowScales::kStride)},
                            {ptx::load_shared(columns), ptx::load_shared(columns + 4)}};
        // The warpgroups alternate: while one waits for its stores to be seen, the other's MMAs go on.
        if (k_block >= kPublishBlock + warpgroup) signal.publish(lane);
        ++k_block;
        return s;
    }
    __device__ __forceinline__ void close(int open) { release_stage<C>(shared, opened(open), lane); }

  private:
    // The stage that was opened a number of stages ago.
    __device__ __forceinline__ int opened(int ago) const { return (stage.at - ago) & (C::kStages - 1); }
};

// Scale factors that came with the stage: one run of those of a tile's rows.
template <class C>
struct RowScalesOfStage {
    static constexpr int kStride = 4;
    const Smem<C>& shared;

    __device__ __forceinline__ std::uint32_t operator()(int stage, int) const {
        return shared.row_scales(stage);
    }
};

// A warpgroup without rows passes the stages of a tile on.
template <class C>
__device__ __forceinline__ void pass_tile(const Smem<C>& shared, RingCursor<C::kStages>& stage, int k_blocks,
                                          IndexedDeferredSignal<C>& signal, int lane) {
    for (int k_block = 0; k_block < k_blocks; ++k_block, stage.next()) {
        signal.wait(shared.full(stage.at), stage.parity, lane);
        release_stage<C>(shared, stage.at, lane);
    }
}

// sums += a tile's GEMM, by a warpgroup with rows.
template <class Stored = SwizzledRows, class C, class RowScales, int Columns>
__device__ __forceinline__ void multiply_quantized(float (&sums)[Columns], const Smem<C>& shared,
                                                   RingCursor<C::kStages>& stage, int k_blocks,
                                                   IndexedDeferredSignal<C>& signal,
                                                   const RowScales& row_scales, int math_warp, int lane) {
    [[maybe_unused]] const std::uint32_t zero = ptx::opaque_zero();
    QuantizedStages<C, RowScales, Stored> stages{shared, stage, signal, row_scales, math_warp / 4, lane};
    if constexpr (Columns == 64) {
        float partial[32];
#pragma unroll
        for (int i = 0; i < 32; ++i)
            partial[i] = 0.0f;
        while (stages.k_block < k_blocks)
            multiply_block_in_turn(sums, partial, zero, stages);
    } else {
        PartialSums partial;
#pragma unroll
        for (int i = 0; i < 64; ++i)
            partial[i / 32][i % 32] = 0.0f;
        while (stages.k_block < k_blocks)
            multiply_blocks<1>(sums, partial, zero, stages);
    }
}

}  // namespace mega_moe::device::sm90
