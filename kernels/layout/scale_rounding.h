#pragma once
#include <cstdint>

namespace mega_moe::layout {

inline constexpr int kQuantGroup = 128;  // elements of a row that share a scale factor

// How a scale factor becomes what is stored: (bits + addend) & mask of the fp32 number. One code path serves
// both forms, and where this is a parameter of the kernel it takes no register.
struct ScaleRounding {
    std::uint32_t addend = 0;
    std::uint32_t mask = 0xFFFFFFFF;
};

inline constexpr ScaleRounding kFp32Scales{};
// Up to a power of two: a mantissa carries into the exponent, unless it is 0.
inline constexpr ScaleRounding kPowerOfTwoScales{0x007FFFFF, 0x7F800000};

constexpr ScaleRounding scale_rounding(bool power_of_two) {
    return power_of_two ? kPowerOfTwoScales : kFp32Scales;
}

}  // namespace mega_moe::layout
