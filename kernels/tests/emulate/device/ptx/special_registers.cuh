#pragma once
#include <chrono>
#include <cstdint>

#include "emulate/cuda.h"

namespace mega_moe::device::ptx {

inline int64_t global_timer() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace mega_moe::device::ptx
