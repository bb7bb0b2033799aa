#pragma once
#include <cstdint>

#include "mega_moe/route.h"
#include "mega_moe/status.h"

namespace mega_moe {

// The whole layer of one rank in one launch. Pointers are device addresses; extents, dtypes, alignment to 16
// bytes and contiguity are checked by the caller. The shape has intermediate > 0, no quantisation and home
// slots; route.weighted is set and route.refuse is not.
struct ForwardProblem {
    RouteProblem route;
    const void* x;          // bf16 [num_tokens, hidden]
    const void* w_gate_up;  // bf16 [num_local, 2 * intermediate, hidden], gate first
    const void* w_down;     // bf16 [num_local, hidden, intermediate]
    void* y;                // bf16 [num_tokens, hidden]
    void* saved_gate_up;    // bf16 [saved_rows, 2 * intermediate], for launch_backward alone to read
    void* trace;            // int64 [CTAs, roles, events, 3], zero; null: the form that does not trace
    std::int64_t trace_bytes;
    std::int64_t saved_rows;   // a multiple of 128; 0: nothing is saved
    float clamp;               // of gate and up; +inf: none
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles, for tests
};

Status launch_forward(const ForwardProblem& problem) noexcept;

}  // namespace mega_moe
