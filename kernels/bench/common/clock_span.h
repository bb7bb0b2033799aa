#pragma once
#include <cstdint>

namespace mega_moe::bench {

// Ticks of one SM and nanoseconds, summed over the launches since it was zeroed: what the clock was while
// they ran.
struct ClockSpan {
    std::int64_t ticks;
    std::int64_t ns;
    std::int64_t start_ticks;  // of the launch that runs
    std::int64_t start_ns;
};

inline double megahertz(const ClockSpan& span) {
    return span.ns > 0 ? 1e3 * static_cast<double>(span.ticks) / static_cast<double>(span.ns) : 0.0;
}

}  // namespace mega_moe::bench
