#pragma once
#include <cmath>

#include "device/base/macros.cuh"

namespace mega_moe::device {

// The scale factor of one 1x128 group and what is needed to divide by it with three multiply-adds per
// element.
struct GroupScale {
    float scale;       // amax / 448, or 1 for a group of zeros; what is stored
    float lift;        // power of two to multiply elements by first; 1 unless the scale is tiny
    float divisor;     // scale * lift
    float reciprocal;  // 1 / divisor, correctly rounded
};

inline constexpr float kE4m3Max = 448.0f;
// Below this scale the residual of an element that does not round to zero could leave the fp32 range.
inline constexpr float kTinyScale = 0x1p-60f;
inline constexpr float kTinyLift = 0x1p+90f;

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

// amax >= 0, Inf or NaN.
MEGA_MOE_HOST_DEVICE GroupScale make_group_scale(float amax) {
    GroupScale g;
    g.scale = amax == 0.0f ? 1.0f : divide_rn(amax, kE4m3Max);
    g.lift = g.scale < kTinyScale ? kTinyLift : 1.0f;
    g.divisor = g.scale * g.lift;
    g.reciprocal = reciprocal_rn(g.divisor);
    // x / Inf is a signed zero, but the residual below would be 0 * Inf. With 0 for both factors it is x * 0.
    if (g.divisor == INFINITY) g.divisor = 0.0f;
    return g;
}

// x / scale as IEEE division rounds it, for x = element * lift and |x| <= amax * lift. Where the quotient is
// so small that e4m3 rounds it to zero only its sign is right. Markstein: the product with the rounded
// reciprocal is off by at most two units, its residual is exact, and one correction rounds correctly. The
// residual is negated (product minus x) so that -0 / scale stays -0.
MEGA_MOE_HOST_DEVICE float divide_by_scale(float x, const GroupScale& g) {
    const float quotient = x * g.reciprocal;
    const float negated_residual = fused_multiply_add(quotient, g.divisor, -x);
    return fused_multiply_add(negated_residual, -g.reciprocal, quotient);
}

}  // namespace mega_moe::device
