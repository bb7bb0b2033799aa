#pragma once
#include <cstdint>

// Two bf16 in one register, the element with the lower address in the low half.
namespace mega_moe::device::ptx {

__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t a) {
    uint32_t d;
    asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// A NaN in either operand is the result, unlike max.bf16x2, which drops it.
__device__ __forceinline__ uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ float low_bf16(uint32_t a) {
    return __uint_as_float(a << 16);
}
__device__ __forceinline__ float high_bf16(uint32_t a) {
    return __uint_as_float(a & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t pack_low_halves(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, 0x5410);
}
__device__ __forceinline__ uint32_t pack_high_halves(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, 0x7632);
}

}  // namespace mega_moe::device::ptx
