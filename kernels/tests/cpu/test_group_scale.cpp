#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "cpu/check.h"
#include "device/common/group_scale.cuh"

// The kernel divides by two products with a reciprocal. Here every bf16 amax meets every bf16 element up to
// it, and the e4m3 code must be that of the IEEE quotient.
namespace {

using mega_moe::device::divide_by_scale;
using mega_moe::device::GroupScale;
using mega_moe::device::make_gradient_scale;
using mega_moe::device::make_group_scale;
using mega_moe::layout::kFp32Scales;
using mega_moe::layout::kPowerOfTwoScales;
using mega_moe::layout::ScaleRounding;

constexpr std::uint32_t kInfinity = 0x7F80;

float from_bf16(std::uint32_t bits) {
    bits <<= 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// Round to nearest even, clamp to 448, keep the sign of zero; NaN is 0x7F whatever its sign.
std::uint8_t to_e4m3(float value) {
    if (std::isnan(value)) return 0x7F;
    const auto sign = static_cast<std::uint8_t>(std::signbit(value) ? 0x80 : 0);
    const float magnitude = std::fabs(value);
    if (magnitude >= 448.0f) return static_cast<std::uint8_t>(sign | 0x7E);
    // The spacing of e4m3 is 2^-9 below 2^-6 and 2^-3 of the leading power of two above.
    const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
    // 16 steps carry into the exponent by themselves: the code of a power of two follows that of the number
    // below.
    const int code = ((exponent + 6) << 3) + steps;
    return static_cast<std::uint8_t>(sign | code);
}

void test_encoder() {
    for (int code = 0; code < 0x7F; ++code) {
        const int exponent = code >> 3;
        const int mantissa = code & 7;
        const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
        CHECK(to_e4m3(value) == code, "%g is %02x, want %02x", value, to_e4m3(value), code);
        CHECK(to_e4m3(-value) == (code | 0x80), "-%g is %02x", value, to_e4m3(-value));
    }
    CHECK(to_e4m3(0x1p-10f) == 0 && to_e4m3(0x1.8p-9f) == 2, "ties go to even");
}

void check_pair(float amax, float element, const GroupScale& g) {
    const float want = element / g.scale;
    const float got = divide_by_scale(element * g.lift, g.high, g.low);
    if (bits_of(want) == bits_of(got)) return;
    CHECK(to_e4m3(want) == to_e4m3(got), "%a with amax %a: %a is %02x, want %a, %02x", element, amax, got,
          to_e4m3(got), want, to_e4m3(want));
}

void test_all_finite_pairs() {
    for (std::uint32_t amax_bits = 0; amax_bits < kInfinity; ++amax_bits) {
        const float amax = from_bf16(amax_bits);
        const GroupScale g = make_group_scale(amax, kFp32Scales);
        const float scale = amax_bits == 0 ? 1.0f : amax / 448.0f;
        CHECK(bits_of(g.scale) == bits_of(scale), "scale of %a is %a, want %a", amax, g.scale, scale);
        // Codes depend on the ratio, so 20 binades below the amax show all that do not vanish; one more, and
        // the smallest elements, show that those vanish with their sign.
        const std::uint32_t first = amax_bits > 20 * 128 ? amax_bits - 20 * 128 : 0;
        for (std::uint32_t bits = first; bits <= amax_bits; ++bits) {
            check_pair(amax, from_bf16(bits), g);
            check_pair(amax, -from_bf16(bits), g);
        }
        for (std::uint32_t bits = 0; bits < first; bits += 61) {
            check_pair(amax, from_bf16(bits), g);
            check_pair(amax, -from_bf16(bits), g);
        }
    }
}

// bf16 holds no amax that small, but activations in fp32 may have one.
void test_amax_without_a_scale() {
    for (const float amax : {0x1p-149f, 0x64p-149f, 0xE0p-149f}) {
        const GroupScale g = make_group_scale(amax, kFp32Scales);
        CHECK(g.scale == 1.0f, "scale of %a is %a, want 1", amax, g.scale);
        CHECK(to_e4m3(divide_by_scale(amax * g.lift, g.high, g.low)) == 0x00, "%a is not 0", amax);
        CHECK(to_e4m3(divide_by_scale(-amax * g.lift, g.high, g.low)) == 0x80, "%a is not -0", -amax);
    }
    const float scale = make_group_scale(0xE1p-149f, kFp32Scales).scale;
    CHECK(scale == 0x1p-149f, "the smallest amax that has a scale has %a", scale);
}

// What the second product is for: without it some codes differ, and this suite would see it.
void test_one_product_is_not_enough() {
    int wrong = 0;
    for (std::uint32_t amax_bits = 0x3F80; amax_bits < 0x4000; ++amax_bits) {
        const GroupScale g = make_group_scale(from_bf16(amax_bits), kFp32Scales);
        for (std::uint32_t bits = amax_bits - 20 * 128; bits <= amax_bits; ++bits) {
            const float element = from_bf16(bits);
            wrong += to_e4m3(element * (1.0f / g.scale)) != to_e4m3(element / g.scale);
        }
    }
    CHECK(wrong > 100, "only %d codes differ", wrong);
}

void test_infinity_and_nan() {
    const float infinity = std::numeric_limits<float>::infinity();
    const GroupScale g = make_group_scale(infinity, kFp32Scales);
    CHECK(g.scale == infinity, "scale of Inf is %g", g.scale);
    for (std::uint32_t bits = 0; bits <= kInfinity; ++bits) {
        check_pair(infinity, from_bf16(bits), g);
        check_pair(infinity, -from_bf16(bits), g);
    }
    const GroupScale n = make_group_scale(std::numeric_limits<float>::quiet_NaN(), kFp32Scales);
    CHECK(std::isnan(n.scale), "scale of NaN is %g", n.scale);
    CHECK(std::isnan(divide_by_scale(1.0f * n.lift, n.high, n.low)), "quotient by NaN");
}

// fp32 has numbers whose 448th part is none; h may hold nothing else. Zeros then, not NaN.
void test_smallest_of_fp32() {
    const float smallest = 0x1p-149f;
    for (int units = 1; units < 4096; ++units) {
        const float amax = static_cast<float>(units) * smallest;
        const GroupScale g = make_group_scale(amax, kFp32Scales);
        CHECK(g.scale == (amax / 448.0f == 0.0f ? 1.0f : amax / 448.0f), "scale of %a is %a", amax, g.scale);
        for (const float element : {0.0f, smallest, amax}) {
            check_pair(amax, element, g);
            check_pair(amax, -element, g);
            const float product = element * g.lift * g.high;
            // A denormal scale is off by up to half, which the conversion clamps.
            CHECK(product >= 0.0f && product < 2 * 448.0f, "%a with amax %a: %a", element, amax, product);
        }
    }
}

// The smallest power of two that does not lift a code above 448, for every amax; quotients by it are exact
// where they are not denormal.
void test_powers_of_two() {
    for (std::uint32_t amax_bits = 0; amax_bits < kInfinity; ++amax_bits) {
        const float amax = from_bf16(amax_bits);
        const GroupScale g = make_group_scale(amax, kPowerOfTwoScales);
        const float least = make_group_scale(amax, kFp32Scales).scale;
        int exponent = 0;
        CHECK(std::frexp(g.scale, &exponent) == 0.5f, "scale of %a is %a", amax, g.scale);
        CHECK(least <= g.scale && (g.scale / 2 < least || g.scale == 0x1p-149f),
              "scale of %a is %a, least %a", amax, g.scale, least);
        for (std::uint32_t drop = 0; drop <= 20 * 128 && drop <= amax_bits; ++drop) {
            check_pair(amax, from_bf16(amax_bits - drop), g);
            check_pair(amax, -from_bf16(amax_bits - drop), g);
        }
    }
    const float smallest = 0x1p-149f;
    for (int units = 1; units < 4096; ++units) {
        const float amax = static_cast<float>(units) * smallest;
        const GroupScale g = make_group_scale(amax, kPowerOfTwoScales);
        const float least = make_group_scale(amax, kFp32Scales).scale;
        CHECK(least <= g.scale && (g.scale / 2 < least || g.scale == smallest), "scale of %a is %a, least %a",
              amax, g.scale, least);
        check_pair(amax, amax, g);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(make_group_scale(infinity, kPowerOfTwoScales).scale == infinity, "scale of Inf");
    CHECK(std::isnan(make_group_scale(std::numeric_limits<float>::quiet_NaN(), kPowerOfTwoScales).scale),
          "scale of NaN");
}

// What the lift and the comparison are for: the bits alone make a normal number of a denormal, and 0 of a
// NaN.
void test_bits_alone_are_not_enough() {
    const auto alone = [](float a) {
        return (bits_of(a) + kPowerOfTwoScales.addend) & kPowerOfTwoScales.mask;
    };
    CHECK(alone(0x3p-149f) == bits_of(0x1p-126f), "%08x", alone(0x3p-149f));
    CHECK(alone(std::numeric_limits<float>::quiet_NaN()) == 0, "NaN");
}

// Scale of an operand of wgrad: amax / 448 wherever that has a finite reciprocal.
void test_gradient_scale() {
    for (std::uint32_t amax_bits = 0; amax_bits < kInfinity; ++amax_bits) {
        const float amax = from_bf16(amax_bits);
        const float scale = make_gradient_scale(amax, kFp32Scales);
        const float plain = amax / 448.0f;
        CHECK(scale == (plain == 0.0f       ? 1.0f
                        : plain < 0x1p-126f ? 0x1p-126f
                                            : plain),
              "scale of %a is %a", amax, scale);
        CHECK(std::isfinite(1.0f / scale) && amax * (1.0f / scale) <= 448.0f * (1.0f + 0x1p-22f),
              "amax %a becomes %a", amax, amax * (1.0f / scale));
        const float rounded = make_gradient_scale(amax, kPowerOfTwoScales);
        int exponent = 0;
        CHECK(std::frexp(rounded, &exponent) == 0.5f && scale <= rounded && rounded / 2 < scale,
              "scale of %a is %a, least %a", amax, rounded, scale);
        CHECK(std::isfinite(1.0f / rounded), "1 / %a", rounded);
    }
    for (const ScaleRounding rounding : {kFp32Scales, kPowerOfTwoScales}) {
        const float infinity = std::numeric_limits<float>::infinity();
        CHECK(make_gradient_scale(infinity, rounding) == infinity, "scale of Inf");
        CHECK(std::isnan(make_gradient_scale(std::numeric_limits<float>::quiet_NaN(), rounding)),
              "scale of NaN");
    }
}

}  // namespace

void test_group_scale() {
    test_gradient_scale();
    test_bits_alone_are_not_enough();
    test_powers_of_two();
    test_encoder();
    test_all_finite_pairs();
    test_amax_without_a_scale();
    test_one_product_is_not_enough();
    test_infinity_and_nan();
    test_smallest_of_fp32();
}
