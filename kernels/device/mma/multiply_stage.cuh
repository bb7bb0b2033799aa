#pragma once
#include <cstdint>

#include "device/mma/operand.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_bf16.cuh"

namespace mega_moe::device {

// d[64, 256] += a[64, 64] b[256, 64]^T of one stage, by a warpgroup; left under way.
__device__ __forceinline__ void multiply_stage(float (&d)[128], std::uint32_t a, std::uint32_t b) {
    const std::uint64_t rows = operand_descriptor<Major::kK>(a);
    const std::uint64_t columns = operand_descriptor<Major::kK>(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        ptx::wgmma_bf16<0, 0>(d, rows + k * kStepOfInstruction<Major::kK>,
                              columns + k * kStepOfInstruction<Major::kK>);
    ptx::wgmma_commit();
}

}  // namespace mega_moe::device
