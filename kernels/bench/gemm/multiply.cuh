#pragma once
#include "bench/gemm/config.cuh"
#include "bench/gemm/pipeline.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_bf16.cuh"
#include "device/ptx/wgmma_e4m3.cuh"
#include "device/sm90/mma/operand.cuh"

namespace mega_moe::bench {

template <class C>
using Accumulators = float[C::kParts][C::kPartRegisters];

// By one warp: the stage may be overwritten, in both blocks of a cluster.
template <class C>
__device__ __forceinline__ void release_stage(const SharedMap<C>& shared, int stage, int lane) {
    if constexpr (C::kClusterSize == 1) {
        if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
    } else {
        if (lane < C::kClusterSize) ptx::mbarrier_arrive_at(shared.empty(stage), lane);
    }
}

// Adds the MMAs of one stage; `a_offset` bytes into a's tile are this warpgroup's rows.
template <class C>
__device__ __forceinline__ void multiply_stage(Accumulators<C>& sums, const SharedMap<C>& shared, int stage,
                                               uint32_t a_offset) {
    using device::sm90::kStepOf64Rows;
    const uint64_t a = device::sm90::operand_descriptor<C::kMajorA>(shared.a(stage) + a_offset);
    const uint64_t b = device::sm90::operand_descriptor<C::kMajorB>(shared.b(stage));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kInstructionsK; ++k) {
#pragma unroll
        for (int m = 0; m < C::kPartsM; ++m) {
#pragma unroll
            for (int n = 0; n < C::kPartsN; ++n) {
                const uint64_t part_a =
                    a + m * kStepOf64Rows + k * device::sm90::kStepOfInstruction<C::kMajorA>;
                const uint64_t part_b = b + n * (C::kInstructionN / 64) * kStepOf64Rows +
                                        k * device::sm90::kStepOfInstruction<C::kMajorB>;
                auto& d = sums[m * C::kPartsN + n];
                if constexpr (C::kElement == Element::kBf16) {
                    ptx::wgmma_bf16<C::kMajorA == device::sm90::Major::kMn,
                                    C::kMajorB == device::sm90::Major::kMn>(d, part_a, part_b);
                } else {
                    ptx::wgmma_e4m3(d, part_a, part_b);
                }
            }
        }
    }
    ptx::wgmma_commit();
}

// One tile, but for its last MMAs, which are still under way: their stage is returned, and `finish_tile`
// ends them. A stage is released when the next one's MMAs are under way, so that the tensor core never
// runs dry.
template <class C>
__device__ __forceinline__ int multiply_tile(Accumulators<C>& sums, const SharedMap<C>& shared,
                                             StageCursor<C>& cursor, int num_k_blocks, uint32_t a_offset,
                                             int lane) {
    int previous = 0;
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
        ptx::mbarrier_wait(shared.full(cursor.stage), cursor.parity);
        multiply_stage<C>(sums, shared, cursor.stage, a_offset);
        ptx::wgmma_wait<1>();
        if (k_block > 0) release_stage<C>(shared, previous, lane);
        previous = cursor.stage;
        cursor.next();
    }
    return previous;
}

template <class C>
__device__ __forceinline__ void finish_tile(const SharedMap<C>& shared, int last_stage, int lane) {
    ptx::wgmma_wait<0>();
    release_stage<C>(shared, last_stage, lane);
}

}  // namespace mega_moe::bench
