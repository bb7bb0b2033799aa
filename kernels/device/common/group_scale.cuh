#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/common/macros.cuh"
#include "layout/scale_rounding.h"

namespace mega_moe::device {

// The scale factor of one block and what is needed to divide by it with two instructions per element.
struct GroupScale {
    float scale;  // amax / 448, or 1 where that is 0, rounded; what is stored
    float lift;   // power of two to multiply elements by first; 1 unless the scale is extreme
    float high;   // 1 / (scale * lift), rounded down, so that `low` is not negative
    float low;    // what `high` lacks
};

inline constexpr float kE4m3Max = 448.0f;
// Within these bounds `low` and its products with elements that do not round to zero are normal numbers.
inline constexpr float kSmallestPlainScale = 0x1p-60f;
inline constexpr float kLargestPlainScale = 0x1p+60f;
inline constexpr float kLiftOfSmall = 0x1p+90f;
inline constexpr float kLiftOfLarge = 0x1p-60f;

MEGA_MOE_HOST_DEVICE float divide_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

MEGA_MOE_HOST_DEVICE float reciprocal_rn(float a) {
#if defined(__CUDA_ARCH__)
    return __frcp_rn(a);
#else
    return 1.0f / a;
#endif
}

MEGA_MOE_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}

MEGA_MOE_HOST_DEVICE std::uint32_t bits_of_float(float a) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(a);
#else
    std::uint32_t bits;
    std::memcpy(&bits, &a, sizeof(bits));
    return bits;
#endif
}

MEGA_MOE_HOST_DEVICE float float_of_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float a;
    std::memcpy(&a, &bits, sizeof(a));
    return a;
#endif
}

// 1 / a of a power of two from 2^-126 to 2^126.
MEGA_MOE_HOST_DEVICE float inverse_of_power(float a) {
    return float_of_bits(0x7F000000 - bits_of_float(a));
}

// The next smaller number of a positive one.
MEGA_MOE_HOST_DEVICE float next_below(float a) {
    return float_of_bits(bits_of_float(a) - 1);
}

// A normal number above 0, at most 2^127. Inf and NaN stay.
MEGA_MOE_HOST_DEVICE float round_scale(float a, layout::ScaleRounding rounding) {
    const float rounded = float_of_bits((bits_of_float(a) + rounding.addend) & rounding.mask);
    return a < INFINITY ? rounded : a;
}

// The scale factor of 128 rows of an operand of a weight's gradient, a column or more of them: amax / 448, or
// 1 where that is 0, and no less than what has a reciprocal.
MEGA_MOE_HOST_DEVICE float make_gradient_scale(float amax, layout::ScaleRounding rounding) {
    constexpr float kLeast = 0x1p-126f;
    const float scale = divide_rn(amax, kE4m3Max);
    // NaN stays.
    return round_scale(scale == 0.0f ? 1.0f : scale < kLeast ? kLeast : scale, rounding);
}

// amax >= 0, Inf or NaN.
MEGA_MOE_HOST_DEVICE GroupScale make_group_scale(float amax, layout::ScaleRounding rounding) {
    GroupScale g;
    float scale = divide_rn(amax, kE4m3Max);
    // A group of zeros, or an amax below about 3e-43, for which fp32 holds no scale: 0 / 0 would make the
    // group NaN.
    if (scale == 0.0f) scale = 1.0f;
    g.lift = scale < kSmallestPlainScale ? kLiftOfSmall : scale > kLargestPlainScale ? kLiftOfLarge : 1.0f;
    // Lifted, a scale is no denormal, and both products are exact.
    const float divisor = round_scale(scale * g.lift, rounding);
    g.scale = divisor * inverse_of_power(g.lift);
    g.high = reciprocal_rn(divisor);
    float residual = fused_multiply_add(-divisor, g.high, 1.0f);
    if (residual < 0.0f) {
        g.high = next_below(g.high);
        residual = fused_multiply_add(-divisor, g.high, 1.0f);
    }
    // NaN for a divisor of Inf, where `high` is 0 and x / Inf is the signed zero x * 0.
    g.low = residual > 0.0f ? residual * g.high : 0.0f;
    return g;
}

// x / scale for x = element * lift and |element| <= amax, close enough to IEEE division for e4m3 to round
// both alike; a test compares all pairs of amax and element. Neither product changes the sign of a zero.
MEGA_MOE_HOST_DEVICE float divide_by_scale(float x, float high, float low) {
    return fused_multiply_add(x, high, x * low);
}

}  // namespace mega_moe::device
