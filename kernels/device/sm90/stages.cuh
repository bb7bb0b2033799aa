#pragma once
#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/sm90/mma/multiply_stage.cuh"
#include "device/sm90/smem.cuh"

// How the math warps of both directions walk the stages and signal what they have stored.
namespace mega_moe::device::sm90 {

// By one warp: both CTAs may overwrite the stage.
template <class C>
__device__ __forceinline__ void release_stage(const Smem<C>& shared, int stage, int lane) {
    if (lane < C::kClusterSize)
        ptx::mbarrier_arrive_at(shared.empty(stage), static_cast<std::uint32_t>(lane));
}

// Signals that a math warp still owes for what it has stored: waiting for the stores at once would delay its
// next tile.
struct DeferredSignal {
    std::uint32_t* counter = nullptr;
    std::uint32_t* second = nullptr;  // of the same stores

    // By one warp. Written, not only read from the buffer: whoever sees the count reads the rows.
    __device__ __forceinline__ void publish(int lane) {
        if (pending() && lane == 0) {
            ptx::bulk_wait<0>();
            if (counter != nullptr) ptx::add_release_gpu(counter, 1);
            if (second != nullptr) ptx::add_release_gpu(second, 1);
        }
        counter = nullptr;
        second = nullptr;
    }
    // Signals what has just been stored, once it is written.
    __device__ __forceinline__ void defer(std::uint32_t* which, std::uint32_t* also, int lane) {
        publish(lane);
        counter = which;
        second = also;
    }
    // Before a wait that may depend on it, if only by way of other CTAs.
    __device__ __forceinline__ void wait(std::uint32_t barrier, std::uint32_t parity, int lane) {
        if (pending() && !ptx::mbarrier_test(barrier, parity)) publish(lane);
        ptx::mbarrier_wait(barrier, parity);
    }
    __device__ __forceinline__ bool pending() const { return counter != nullptr || second != nullptr; }
};

// By then a tile's stores are written, and publishing them does not wait.
inline constexpr int kPublishBlock = 1;

// One tile, except that its last MMAs are still in flight: their stage is returned. A stage is released when
// the next one's MMAs are in flight, so that the tensor cores never run dry. `a_offset`
// bytes into a stage are the warpgroup's rows; without any it just passes the stages on.
template <class C, Major A = Major::kK, Major B = Major::kK, int Count>
__device__ __forceinline__ int multiply_tile(float (&d)[Count], const Smem<C>& shared,
                                             RingCursor<C::kStages>& stage, int k_blocks,
                                             std::uint32_t a_offset, bool any_rows, DeferredSignal& signal,
                                             int lane) {
    int previous = 0;
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
        ptx::mbarrier_wait(shared.full(stage.at), stage.parity);
        if (any_rows) multiply_stage<A, B>(d, shared.a(stage.at) + a_offset, shared.b(stage.at));
        if (k_block == kPublishBlock) signal.publish(lane);
        ptx::wgmma_wait<1>();
        if (k_block > 0) release_stage<C>(shared, previous, lane);
        previous = stage.at;
        stage.next();
    }
    return previous;
}

}  // namespace mega_moe::device::sm90
