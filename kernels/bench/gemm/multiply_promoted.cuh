#pragma once
#include "bench/gemm/multiply.cuh"
#include "bench/gemm/params.h"

namespace mega_moe::bench {

// One tile of e4m3 whose sums leave the tensor core every 128 of the contraction: there an accumulator keeps
// about 14 bits, and the scales change. The tile's halves of 128 columns, one scale of b each, follow one
// another: the partial sums of both do not fit into registers, and the other warpgroup's MMAs fill the
// gaps.
template <class C>
__device__ __forceinline__ void multiply_tile_promoted(Accumulators<C>& sums, const SharedMap<C>& shared,
                                                       StageCursor<C>& cursor, const GemmParams& p,
                                                       int column, int warpgroup, int lane) {
    const float* scale_low = p.b_scale + static_cast<int64_t>(column / 128) * p.num_k_blocks;
    const float* scale_high = scale_low + p.num_k_blocks;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16 + lane / 4;
    float scale_b[2] = {__ldg(scale_low), __ldg(scale_high)};
    for (int k_block = 0; k_block < p.num_k_blocks; ++k_block) {
        // One ahead: a load from global memory takes as long as a stage's MMAs.
        const int ahead = k_block + 1 < p.num_k_blocks ? k_block + 1 : k_block;
        const float next_scale_b[2] = {__ldg(scale_low + ahead), __ldg(scale_high + ahead)};
        ptx::mbarrier_wait(shared.full(cursor.stage), cursor.parity);
        const float* scale_a = shared.scale_values(cursor.stage) + row;
        const float scale_upper = scale_a[0];
        const float scale_lower = scale_a[8];
        const uint64_t a =
            device::sm90::operand_descriptor<C::kMajorA>(shared.a(cursor.stage) + warpgroup * 64 * 128);
        const uint64_t b = device::sm90::operand_descriptor<C::kMajorB>(shared.b(cursor.stage));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float partial[64];
            const uint64_t half_b = b + half * 2 * device::sm90::kStepOf64Rows;
            ptx::wgmma_fence();
            ptx::wgmma_e4m3_first(partial, a, half_b);
#pragma unroll
            for (int k = 1; k < C::kInstructionsK; ++k) {
                ptx::wgmma_e4m3(partial, a + k * device::sm90::kStepOfInstruction<C::kMajorA>,
                                half_b + k * device::sm90::kStepOfInstruction<C::kMajorB>);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            if (half == 1) release_stage<C>(shared, cursor.stage, lane);
            const float upper = scale_upper * scale_b[half];
            const float lower = scale_lower * scale_b[half];
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                sums[half][i] = fmaf(upper, partial[i], sums[half][i]);
                sums[half][i + 1] = fmaf(upper, partial[i + 1], sums[half][i + 1]);
                sums[half][i + 2] = fmaf(lower, partial[i + 2], sums[half][i + 2]);
                sums[half][i + 3] = fmaf(lower, partial[i + 3], sums[half][i + 3]);
            }
            // Holds this half's promotion before the next half's MMAs.
#pragma unroll
            for (int i = 0; i < 64; ++i)
                asm volatile("" : "+f"(sums[half][i]));
        }
        scale_b[0] = next_scale_b[0];
        scale_b[1] = next_scale_b[1];
        cursor.next();
    }
}

}  // namespace mega_moe::bench
