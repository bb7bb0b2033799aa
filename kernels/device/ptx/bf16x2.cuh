#pragma once
#include <cstdint>

// Two bf16 in one register, the element with the lower address in the low half.
namespace mega_moe::device::ptx {

__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t a) {
    uint32_t d;
    asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// max(|a|, |b|) per half, with the product of their signs. A NaN in either operand is the result, unlike
// max.bf16x2, which drops it. Saves the absolute values that a plain maximum would need.
__device__ __forceinline__ uint32_t max_abs_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
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

// Eight bf16 times a power of two, exact unless a product leaves the range of bf16.
__device__ __forceinline__ uint4 scale_bf16x8(uint4 v, float power_of_two) {
    const uint32_t factor = __float_as_uint(power_of_two) >> 16;
    const uint32_t factors = factor | factor << 16;
    const auto product = [&](uint32_t a) {
        uint32_t d;
        // -0 as the addend keeps the sign of a zero product.
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(factors), "r"(0x80008000u));
        return d;
    };
    return {product(v.x), product(v.y), product(v.z), product(v.w)};
}

}  // namespace mega_moe::device::ptx
