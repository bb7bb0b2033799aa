#pragma once
#include <cstdint>

#include "device/comm/fault.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/special_registers.cuh"
#include "layout/endpoint.h"

namespace mega_moe::device {

// Polls between two checks of the clock and the abort word; a poll takes about half a microsecond.
inline constexpr int kPollsPerCheck = 16;

// Polls `load` until it returns at least `wanted`. False when `limit_ns` have passed or a rank has given up;
// `seen` is the last value either way.
template <class Load>
__device__ __forceinline__ bool wait_for(const layout::Endpoint& e, Load load, std::uint64_t wanted,
                                         std::int64_t limit_ns, std::uint64_t& seen) {
    seen = load();
    if (seen >= wanted) return true;
    const std::int64_t start = ptx::global_timer();
    for (;;) {
#pragma unroll 1
        for (int i = 0; i < kPollsPerCheck; ++i) {
            seen = load();
            if (seen >= wanted) return true;
        }
        if (abort_word(e) != 0 || ptx::global_timer() - start > limit_ns) return false;
    }
}

}  // namespace mega_moe::device
