#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "bench/common/clock_span.h"
#include "bench/common/report.h"

namespace mega_moe::bench {

// A card under its power cap has two speeds. Burst: about 10 ms after a quarter of a second of idling, before
// the cap pulls the clock down. Sustained: back to back for some tenths of a second. A figure without its
// clock says little, so both are read.
struct Timing {
    double burst_us;  // per launch, median of three
    double burst_mhz;
    double sustained_us;
    double sustained_mhz;

    void add_to(Line& line) const;
};

struct TimingPlan {
    double idle_ms = 250;
    double burst_ms = 10;
    double sustained_ms = 100;  // per block; a block warms up, three are timed
};

// Enqueues one launch on `stream` of `device`; its kernel sums into `clock`, memory of that device.
struct TimedLaunch {
    std::function<void()> launch;
    ClockSpan* clock;
    int device = 0;
    cudaStream_t stream = nullptr;
};

// One timing for each, all of them running at the same time.
std::vector<Timing> time_together(const std::vector<TimedLaunch>& launches, const TimingPlan& plan = {});

inline Timing time_launches(const std::function<void()>& launch, ClockSpan* clock,
                            const TimingPlan& plan = {}) {
    return time_together({{launch, clock}}, plan)[0];
}

}  // namespace mega_moe::bench
