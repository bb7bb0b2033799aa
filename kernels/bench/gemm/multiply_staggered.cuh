#pragma once
#include "bench/gemm/multiply.cuh"
#include "bench/gemm/params.h"
#include "device/sm90/mma/multiply_promoted.cuh"

namespace mega_moe::bench {

// A tile's stages as device::sm90::multiply_blocks takes them.
template <class C>
struct PromotedStages {
    using Stored = device::sm90::SwizzledRows;

    const SharedMap<C>& shared;
    StageCursor<C>& cursor;  // the next that is opened
    int lane;
    int closing;         // the stage that is closed next
    int scale_row;       // the thread's first row
    uint32_t a_offset;   // of the warpgroup's rows in a stage
    const float* first;  // scales of b
    const float* second;
    float columns[2];
    int left;  // k-blocks after the current one

    __device__ __forceinline__ device::sm90::StageOperands open() {
        ptx::mbarrier_wait(shared.full(cursor.stage), cursor.parity);
        const device::sm90::StageOperands at{
            device::sm90::descriptor_low<C::kMajorA>(shared.a(cursor.stage) + a_offset),
            device::sm90::descriptor_low<C::kMajorB>(shared.b(cursor.stage))};
        cursor.next();
        return at;
    }
    __device__ __forceinline__ device::sm90::BlockScales scales() {
        const float* rows = shared.scale_values(closing) + scale_row;
        const device::sm90::BlockScales s{{rows[0], rows[8]}, {columns[0], columns[1]}};
        // One ahead: a load from global memory takes as long as a pass.
        if (--left >= 0) {
            columns[0] = __ldg(++first);
            columns[1] = __ldg(++second);
        }
        return s;
    }
    __device__ __forceinline__ void close(int) {
        release_stage<C>(shared, closing, lane);
        closing = closing + 1 == C::kStages ? 0 : closing + 1;
    }
};

// One tile of e4m3, in passes of which the next is under way while one is promoted.
template <class C>
__device__ __forceinline__ void multiply_tile_staggered(float (&sums)[128], const SharedMap<C>& shared,
                                                        StageCursor<C>& cursor, const GemmParams& p,
                                                        int column, int warpgroup, int lane) {
    const float* first = p.b_scale + static_cast<int64_t>(column / 128) * p.num_k_blocks;
    const float* second = first + p.num_k_blocks;
    PromotedStages<C> stages{shared,
                             cursor,
                             lane,
                             cursor.stage,
                             warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16 + lane / 4,
                             static_cast<uint32_t>(warpgroup * 64 * device::sm90::kOperandRowBytes),
                             first,
                             second,
                             {__ldg(first), __ldg(second)},
                             p.num_k_blocks - 1};
    const uint32_t zero = ptx::opaque_zero();
    device::sm90::PartialSums partial;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        partial[i / 32][i % 32] = 0.0f;
    int k_block = 0;
    for (; k_block + C::kBlocksAtOnce <= p.num_k_blocks; k_block += C::kBlocksAtOnce)
        device::sm90::multiply_blocks<C::kBlocksAtOnce>(sums, partial, zero, stages);
    if constexpr (C::kBlocksAtOnce > 1) {
        for (; k_block < p.num_k_blocks; ++k_block)
            device::sm90::multiply_blocks<1>(sums, partial, zero, stages);
    }
}

}  // namespace mega_moe::bench
