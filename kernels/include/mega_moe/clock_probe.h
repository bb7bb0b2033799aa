#pragma once
#include <cstdint>

#include "mega_moe/status.h"

namespace mega_moe {

// Writes (SM id, SM clock, global timer in ns) of each SM at row [SM id] of `out`, int64 [num_sms, 3].
struct ClockProbeProblem {
    std::int64_t* out;
    std::int64_t num_rows;  // must equal the number of SMs
    int device;
    void* stream;  // cudaStream_t
};

Status launch_clock_probe(const ClockProbeProblem& problem) noexcept;

}  // namespace mega_moe
