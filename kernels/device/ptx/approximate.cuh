#pragma once

// Functions of the special function unit. ex2 is within 2 ulp, rcp within 1 ulp; both flush denormals.
namespace mega_moe::device::ptx {

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace mega_moe::device::ptx
