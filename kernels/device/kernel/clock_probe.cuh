#pragma once
#include <cstdint>

#include "device/ptx/special_registers.cuh"

namespace mega_moe::device {

// Launched with one block per SM and so much shared memory that no two fit. A block that ended at once could
// free its SM for a later one, so each stays until all have surely started.
inline constexpr int64_t kProbeTicks = 8192;

template <int Threads>
__global__ void __launch_bounds__(Threads, 1) clock_probe(int64_t* out) {
    if (threadIdx.x != 0) return;
    const int64_t start = ptx::sm_clock();
    while (ptx::sm_clock() - start < kProbeTicks) {
    }
    int64_t* row = out + int64_t{3} * ptx::sm_id();
    row[0] = ptx::sm_id();
    row[1] = ptx::sm_clock();
    row[2] = ptx::global_timer();
}

}  // namespace mega_moe::device
