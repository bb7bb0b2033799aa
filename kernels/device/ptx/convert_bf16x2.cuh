#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Two fp32 to bf16, round to nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t convert_bf16x2(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

}  // namespace mega_moe::device::ptx
