#pragma once
#include <cstdint>

#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_bf16.cuh"
#include "device/sm90/mma/operand.cuh"

namespace mega_moe::device::sm90 {

// d[64, N] += a[64, 64] b[N, 64]^T of one stage, by a warpgroup; left under way. The length of d says which
// N.
template <Major A = Major::kK, Major B = Major::kK, int Count>
__device__ __forceinline__ void multiply_stage(float (&d)[Count], std::uint32_t a, std::uint32_t b) {
    const std::uint64_t rows = operand_descriptor<A>(a);
    const std::uint64_t columns = operand_descriptor<B>(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        ptx::wgmma_bf16<A == Major::kMn, B == Major::kMn>(d, rows + k * kStepOfInstruction<A>,
                                                          columns + k * kStepOfInstruction<B>);
    ptx::wgmma_commit();
}

}  // namespace mega_moe::device::sm90
