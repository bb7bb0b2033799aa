#pragma once
#include <cstdint>

#include "mega_moe/route.h"
#include "mega_moe/status.h"

namespace mega_moe {

// The backward of the whole layer of one rank in one launch, under the same conditions as the forward; the
// shape has `backward` set. Results that nobody wants are null, and nothing is computed for them. Whether dx
// and dtopk are wanted must be equal on all ranks, and is said beside them since either may be empty.
struct BackwardProblem {
    RouteProblem route;
    const void* x;          // bf16 [num_tokens, hidden]
    const void* dy;         // bf16 [num_tokens, hidden]
    const void* w_gate_up;  // bf16 [num_local, 2 * intermediate, hidden], gate first
    const void* w_down;     // bf16 [num_local, hidden, intermediate]
    // Where the shape's backward is quantized: w_gate_up and these are e4m3, and w_down is not read.
    const void* w_gate_up_transposed;  // [num_local, hidden, 2 * intermediate]
    const void* w_down_transposed;     // [num_local, intermediate, hidden]
    const float* gate_up_scales;       // of each 128 x 128, as of the weights that are not transposed:
    const float* down_scales;   // [num_local, 2 * intermediate / 128, hidden / 128], [.., hidden / 128, ..]
    const void* saved_gate_up;  // what launch_forward left there for the same tokens; in bf16 alone
    void* dx;                   // bf16 [num_tokens, hidden]
    void* dtopk;                // fp32 [num_tokens, top_k]
    void* dw_gate_up;           // bf16 or fp32, as w_gate_up
    void* dw_down;              // the same, as w_down
    void* trace;                // int64 [CTAs, roles, events, 3], zero; null: the form that does not trace
    std::int64_t trace_bytes;
    std::int64_t saved_rows;   // as in the forward; 0: gate and up are computed again
    float clamp;               // of gate and up; +inf: none
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles, for tests
    bool power_of_two;         // if quantized: round scale factors of x, dy and dz up to one
    bool needs_dx;
    bool needs_dtopk;
    bool gradients_are_fp32;  // of the weights
    bool accumulate;          // add to what dw_gate_up and dw_down hold
};

Status launch_backward(const BackwardProblem& problem) noexcept;

}  // namespace mega_moe
