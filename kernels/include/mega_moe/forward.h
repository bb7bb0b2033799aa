#pragma once
#include <cstdint>

#include "mega_moe/route.h"
#include "mega_moe/status.h"

namespace mega_moe {

// The whole layer of one rank in one launch. Pointers are device addresses; extents, dtypes, alignment to 16
// bytes and contiguity are checked by the caller. The shape has intermediate > 0 and home slots; with
// quantization both products are in e4m3. route.weighted is set and route.refuse is not.
struct ForwardProblem {
    RouteProblem route;
    // bf16 [num_tokens, hidden]; or, if quantized and x_is_e4m3, the place of e4m3 rows in the rank's own
    // symmetric buffer, which are there beside their scale factors.
    const void* x;
    const void* w_gate_up;  // bf16, or e4m3 if quantized, [num_local, 2 * intermediate, hidden], gate first
    const void* w_down;     // the same [num_local, hidden, intermediate]
    // fp32, of each 128 x 128 of the weights, if quantized.
    const float* gate_up_scales;  // [num_local, 2 * intermediate / 128, hidden / 128]
    const float* down_scales;     // [num_local, hidden / 128, intermediate / 128]
    void* y;                      // bf16 [num_tokens, hidden]
    void* saved_gate_up;          // bf16 [saved_rows, 2 * intermediate], for launch_backward alone to read
    void* trace;                  // int64 [CTAs, roles, events, 3], zero; null: the form that does not trace
    std::int64_t trace_bytes;
    std::int64_t saved_rows;  // a multiple of 128; 0: nothing is saved
    bool x_is_e4m3;
    bool power_of_two;         // if quantized: round scale factors of x and h up to one
    float clamp;               // of gate and up; +inf: none
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles, for tests
};

Status launch_forward(const ForwardProblem& problem) noexcept;

}  // namespace mega_moe
