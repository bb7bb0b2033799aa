#pragma once
#include <cstdint>

#include "layout/route_params.h"
#include "layout/scale_rounding.h"
#include "layout/trace.h"
#include "mega_moe/activation.h"

namespace mega_moe::layout {

// Rows that travel from the tokens' ranks to those of their experts. In bf16; those of the forward in fp8 are
// made e4m3 on their way into the symmetric buffer.
struct MovedRows {
    const std::byte* from;  // the caller's, bf16 [num_tokens, hidden]; null: e4m3 is staged already
    std::byte* pool;        // by slot
    std::int64_t staged;    // offset of the rank's copy in each symmetric buffer
};

// Where the codes of rows that are quantized on arrival go.
struct ArrivedCodes {
    std::byte* codes;  // e4m3, by slot
    float* scales;     // [rows / 128][hidden / 128][128]: so a tile's of one k-block are one run
};

// Codes of a single rank's own tokens (EP=1), which it quantizes before it routes: by token, and in its
// order.
struct OwnCodes {
    std::byte* codes;  // e4m3 [num_tokens, hidden]; null: rows are quantized on arrival
    float* scales;     // [num_tokens, hidden / 128]
};

// Gate and up of the rows with the lowest slots, which the forward saves for the backward; see
// layout/saved_gate_up.h.
struct SavedGateUp {
    std::byte* memory;
    std::int32_t slots;  // a multiple of layout::kTileRows; 0: none
};

// What both directions of the layer take.
struct LayerParams {
    RouteParams route;
    MovedRows moved[2];       // x; dy in the backward alone
    MovedRows moved_scales;   // where e4m3 travels: scale factors of x, fp32 [., hidden / 128]
    ArrivedCodes codes[2];    // of each of `moved`, in a backward in fp8
    OwnCodes own[2];          // likewise
    const std::byte* summed;  // pool of the rows that are summed over a token's experts
    SavedGateUp saved;        // where the kernel is the form that saves
    std::byte* out;           // the caller's, the sums: bf16 [num_tokens, hidden]
    std::uint32_t* counters;  // layout/pools.h
    std::int64_t num_counters;
    std::int64_t sent;  // first words of the counters by kind
    std::int64_t arrived;
    std::int64_t summed_done;     // of what a token's sum waits for, by row block
    std::uint32_t summed_wanted;  // and how much of it
    std::int64_t x_flags;         // offsets in each rank's symmetric buffer
    std::int64_t sent_flags;
    std::int64_t owner_sums;  // where ranks send their sums to the owner rank of a token
    std::int64_t pool_rows;   // of one pool
    std::int32_t hidden;
    std::int32_t intermediate;
    std::int32_t first_per_warp;  // tokens that each warp copies before the roles part
    Activation activation;
    ScaleRounding rounding;    // of all that the kernel quantizes
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles, for tests
    bool returns_rows;         // sums are wanted, on all ranks alike
    bool spreads_rows;  // where rows are quantized as they arrive: sums over rows read them in bf16 too
    TraceBuffer trace;
};

}  // namespace mega_moe::layout
