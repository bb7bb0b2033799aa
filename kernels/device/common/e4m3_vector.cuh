#pragma once
#include <cstdint>

#include "device/common/group_scale.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/e4m3.cuh"

// Eight neighboring bf16 elements, one 16-byte vector, on their way to e4m3.
namespace mega_moe::device {

// Largest magnitude per half of the register, with a sign that means nothing.
__device__ __forceinline__ uint32_t amax_of_vector(uint4 v) {
    return ptx::max_abs_nan_bf16x2(ptx::max_abs_nan_bf16x2(v.x, v.y), ptx::max_abs_nan_bf16x2(v.z, v.w));
}

// The codes, the lowest address in the low byte.
__device__ __forceinline__ uint2 quantize_vector(uint4 v, float high, float low) {
    const auto quotient = [&](float x) { return divide_by_scale(x, high, low); };
    const auto four = [&](uint32_t a, uint32_t b) {
        return ptx::convert_e4m3x4(quotient(ptx::low_bf16(a)), quotient(ptx::high_bf16(a)),
                                   quotient(ptx::low_bf16(b)), quotient(ptx::high_bf16(b)));
    };
    return {four(v.x, v.y), four(v.z, v.w)};
}

}  // namespace mega_moe::device
