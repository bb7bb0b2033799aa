#pragma once
#include <cstdint>

#include "device/ptx/special_registers.cuh"

namespace mega_moe::device {

// Pauses at random places, so that tests meet orders that a quiet machine never shows.
__device__ __forceinline__ void maybe_delay(std::uint32_t seed, std::uint32_t index) {
    if (seed == 0) return;
    std::uint32_t h = (index + ptx::cta_id() * 7919u) * 2654435761u ^ seed;
    h ^= h >> 15;
    h *= 2246822519u;
    if (h >> 28 == 0) ptx::sleep_ns(h >> 12 & 0x7FFF);
}

}  // namespace mega_moe::device
