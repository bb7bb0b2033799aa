#pragma once
#include <cstdint>

#include "mega_moe/activation.h"
#include "mega_moe/buffer.h"
#include "mega_moe/status.h"

// The layer's launches. Pointers are device addresses on `device`, aligned to 16 bytes; extents, dtypes and
// peers are checked by the caller. A result that nobody wants is null, and nothing is computed for it.
namespace mega_moe {

struct LayerInputs {
    const void* x;             // bf16 [num_tokens, hidden]
    const void* topk_idx;      // int32 or int64 [num_tokens, top_k]
    const void* topk_weights;  // fp32 or bf16 [num_tokens, top_k]
    const void* w_gate_up;     // [num_local, 2 * intermediate, hidden], gate first; bf16, in fp8 e4m3
    const void* w_down;        // [num_local, hidden, intermediate], dtype of w_gate_up
};

// What fp8 GEMMs read in addition to LayerInputs: transposed copies of the weights for dgrad, and fp32 scale
// factors of each 128 x 128, which serve both copies.
struct Fp8Weights {
    const void* w_gate_up_t;  // e4m3 [num_local, hidden, 2 * intermediate]
    const void* w_down_t;     // e4m3 [num_local, intermediate, hidden]
    const float* gate_up_sf;  // [num_local, 2 * intermediate / 128, hidden / 128]
    const float* down_sf;     // [num_local, hidden / 128, intermediate / 128]
};

// One launch on a rank's memory. The routing kernel reads the ids and weights of `inputs` alone.
struct RankCall {
    BufferShape shape;
    LayerInputs inputs;
    std::int32_t* summary;        // summary_length words
    const std::int64_t* buffers;  // [num_ranks]: addresses of the symmetric buffers
    void* workspace;
    void* record;  // pinned host memory, layout::kRecordWords words
    std::int64_t num_tokens;
    std::int64_t rank;
    std::int64_t num_sms;  // CTAs at most; 0: all SMs
    std::int64_t arrival_ns;
    std::int64_t progress_ns;
    bool idx_is_64_bit;
    bool weights_are_bf16;
    bool weighted;  // the slots get weights; equal on all ranks
    bool refuse;    // take no part, and signal it to the others: num_tokens is over max_tokens
    int device;
    void* stream;  // cudaStream_t
};

// Gate and up as the forward leaves them for the backward of the same tokens: bf16 [rows, 2 * intermediate]
// in an order of the kernels' own, of the rows with the lowest slots.
struct SavedGateUp {
    void* memory;
    std::int64_t rows;  // a multiple of 128; 0: nothing is saved
};

// For tests and tools.
struct Probes {
    void* trace;  // int64 [CTAs, roles, events, 3], zero; null: the variant that does not trace
    std::int64_t trace_bytes;
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles
};

struct ForwardProblem {
    RankCall call;
    Fp8Weights fp8;
    void* y;  // bf16 [num_tokens, hidden]
    SavedGateUp saved;
    Activation activation;
    Probes probes;
    // inputs.x is e4m3 and lies where the rank stages it in its symmetric buffer, with its scale factors.
    bool x_is_staged;
};

struct BackwardProblem {
    RankCall call;
    Fp8Weights fp8;  // where the mode's backward is fp8; inputs.w_down is then not read
    const void* dy;  // bf16 [num_tokens, hidden]
    SavedGateUp saved;
    void* dx;          // bf16 [num_tokens, hidden]
    void* dtopk;       // fp32 [num_tokens, top_k]
    void* dw_gate_up;  // bf16 or fp32, as w_gate_up
    void* dw_down;     // bf16 or fp32, as w_down
    Activation activation;
    Probes probes;
    // On all ranks alike. Not read off the pointers, since a wanted result may be empty.
    bool needs_dx;
    bool needs_dtopk;
    bool dw_is_fp32;
    bool accumulate;  // add to what dw_gate_up and dw_down hold
};

// Builds the routing tables of one rank.
Status launch_route(const RankCall& call) noexcept;
// The whole layer of one rank in one launch; and every gradient of it in another.
Status launch_forward(const ForwardProblem& problem) noexcept;
Status launch_backward(const BackwardProblem& problem) noexcept;

}  // namespace mega_moe
