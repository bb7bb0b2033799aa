#pragma once

namespace mega_moe::device::ptx {

// max(|a|, |b|); NaN if either is.
__device__ __forceinline__ float max_abs_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
    return d;
}

}  // namespace mega_moe::device::ptx
