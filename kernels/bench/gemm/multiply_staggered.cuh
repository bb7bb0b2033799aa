#pragma once
#include "bench/gemm/multiply.cuh"
#include "bench/gemm/params.h"

namespace mega_moe::bench {

// Adds the scaled partial sums of 64 columns.
__device__ __forceinline__ void promote_quarter(float* sums, float (&partial)[32], float upper, float lower) {
    // Nothing that reads them may come before the wait for them.
#pragma unroll
    for (int i = 0; i < 32; ++i)
        asm volatile("" : "+f"(partial[i]));
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        sums[i] = fmaf(upper, partial[i], sums[i]);
        sums[i + 1] = fmaf(upper, partial[i + 1], sums[i + 1]);
        sums[i + 2] = fmaf(lower, partial[i + 2], sums[i + 2]);
        sums[i + 3] = fmaf(lower, partial[i + 3], sums[i + 3]);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i)
        asm volatile("" : "+f"(sums[i]));
}

// Starts the products of one stage and 64 columns; left under way. `zero` is 0.
template <class C>
__device__ __forceinline__ void start_quarter(float (&partial)[32], uint64_t a, uint64_t b, uint32_t zero) {
    ptx::wgmma_fence();
    ptx::wgmma_e4m3_if(partial, a, b, zero);
#pragma unroll
    for (int k = 1; k < C::kInstructionsK; ++k) {
        ptx::wgmma_e4m3(partial, a + k * device::kStepOfInstruction<C::kMajorA>,
                        b + k * device::kStepOfInstruction<C::kMajorB>);
    }
    ptx::wgmma_commit();
}

// The same as multiply_tile_promoted, in four passes of 64 columns, of which the next is under way while one
// is promoted: the tensor core does not depend on the other warpgroup to fill the gaps. Nothing is under way
// from one stage to the next: ptxas does not follow a pass around the loop, and would serialise all of them.
template <class C>
__device__ __forceinline__ void multiply_tile_staggered(Accumulators<C>& sums, const SharedMap<C>& shared,
                                                        StageCursor<C>& cursor, const GemmParams& p,
                                                        int column, int warpgroup, int lane) {
    const float* scale_low = p.b_scale + static_cast<int64_t>(column / 128) * p.num_k_blocks;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16 + lane / 4;
    float partial[2][32] = {};
    const uint32_t zero = ptx::opaque_zero();
    for (int k_block = 0; k_block < p.num_k_blocks; ++k_block) {
        const float scale_b[2] = {__ldg(scale_low + k_block), __ldg(scale_low + p.num_k_blocks + k_block)};
        ptx::mbarrier_wait(shared.full(cursor.stage), cursor.parity);
        const float* scale_a = shared.scale_values(cursor.stage) + row;
        const float scale_upper = scale_a[0];
        const float scale_lower = scale_a[8];
        const uint64_t a =
            device::operand_descriptor<C::kMajorA>(shared.a(cursor.stage) + warpgroup * 64 * 128);
        const uint64_t b = device::operand_descriptor<C::kMajorB>(shared.b(cursor.stage));
        start_quarter<C>(partial[0], a, b, zero);
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            if (quarter < 3) {
                start_quarter<C>(partial[(quarter + 1) % 2], a, b + (quarter + 1) * device::kStepOf64Rows, zero);
                ptx::wgmma_wait<1>();
            } else {
                ptx::wgmma_wait<0>();
                release_stage<C>(shared, cursor.stage, lane);
            }
            promote_quarter(&sums[quarter / 2][quarter % 2 * 32], partial[quarter % 2],
                            scale_upper * scale_b[quarter / 2], scale_lower * scale_b[quarter / 2]);
        }
        cursor.next();
    }
}

}  // namespace mega_moe::bench
