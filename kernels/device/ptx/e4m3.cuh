#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Two fp32 to e4m3, round to nearest even, clamped to +-448, NaN kept; `low` in the low byte.
__device__ __forceinline__ uint16_t convert_e4m3x2(float low, float high) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ uint32_t convert_e4m3x4(float a, float b, float c, float d) {
    const uint32_t low = convert_e4m3x2(a, b);
    const uint32_t high = convert_e4m3x2(c, d);
    return low | high << 16;
}

}  // namespace mega_moe::device::ptx
