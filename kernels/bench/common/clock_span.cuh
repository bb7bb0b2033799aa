#pragma once
#include "bench/common/clock_span.h"
#include "device/ptx/special_registers.cuh"

namespace mega_moe::bench {

// Called by the same thread at both ends of a kernel. The start lies in memory, not in registers that the
// kernel needs.
__device__ __forceinline__ void start_clock(ClockSpan* span) {
    span->start_ticks = device::ptx::sm_clock();
    span->start_ns = device::ptx::global_timer();
}

__device__ __forceinline__ void stop_clock(ClockSpan* span) {
    span->ticks += device::ptx::sm_clock() - span->start_ticks;
    span->ns += device::ptx::global_timer() - span->start_ns;
}

}  // namespace mega_moe::bench
