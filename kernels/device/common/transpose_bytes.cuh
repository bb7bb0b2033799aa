#pragma once
#include <cstdint>

#include "device/common/macros.cuh"

namespace mega_moe::device {

// Byte i of the result is that of the eight bytes of a and b which nibble i of the selector numbers.
MEGA_MOE_HOST_DEVICE std::uint32_t pick_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    const std::uint64_t both = std::uint64_t{b} << 32 | a;
    std::uint32_t picked = 0;
    for (int i = 0; i < 4; ++i)
        picked |= static_cast<std::uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return picked;
#endif
}

// Four rows of four bytes, the first in the low byte, to four columns.
MEGA_MOE_HOST_DEVICE void transpose_4x4(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                        std::uint32_t& d) {
    const std::uint32_t ab_low = pick_bytes(a, b, 0x5140);
    const std::uint32_t ab_high = pick_bytes(a, b, 0x7362);
    const std::uint32_t cd_low = pick_bytes(c, d, 0x5140);
    const std::uint32_t cd_high = pick_bytes(c, d, 0x7362);
    a = pick_bytes(ab_low, cd_low, 0x5410);
    b = pick_bytes(ab_low, cd_low, 0x7632);
    c = pick_bytes(ab_high, cd_high, 0x5410);
    d = pick_bytes(ab_high, cd_high, 0x7632);
}

// Eight rows of eight bytes, as [row][half], to eight columns.
MEGA_MOE_HOST_DEVICE void transpose_8x8(std::uint32_t (&m)[8][2]) {
    for (int half = 0; half < 2; ++half) {
        transpose_4x4(m[0][half], m[1][half], m[2][half], m[3][half]);
        transpose_4x4(m[4][half], m[5][half], m[6][half], m[7][half]);
    }
    // The blocks off the diagonal change places.
    for (int i = 0; i < 4; ++i) {
        const std::uint32_t upper = m[i][1];
        m[i][1] = m[4 + i][0];
        m[4 + i][0] = upper;
    }
}

}  // namespace mega_moe::device
