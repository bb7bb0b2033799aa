#pragma once
#include <cstdint>

#include "layout/endpoint.h"

namespace mega_moe::layout {

// Parameters of the routing phase. Pointers without another word are into the workspace, see
// layout/workspace.h; offsets are into each rank's symmetric buffer, see layout/symmetric.h.
struct RouteParams {
    Endpoint endpoint;
    const void* topk_idx;      // the caller's, int32 or int64 [num_tokens, top_k]
    const void* topk_weights;  // the caller's, fp32 or bf16 [num_tokens, top_k]; only when `weighted`
    std::int32_t* summary;     // the caller's, layout::summary_length words
    std::int64_t headers;
    std::int64_t block_flags;
    std::int64_t ids;
    std::int64_t ids_bank;  // bytes of a bank
    std::int64_t weights;
    std::int64_t weights_bank;
    std::uint32_t* group_counts;
    std::uint32_t* cta_counts;
    std::uint32_t* block_counts;
    std::int32_t* chunk_table;
    std::int32_t* expert_rows;
    std::int32_t* expert_slots;
    std::int32_t* pull_starts;
    std::int32_t* push_starts;
    std::uint64_t* slots;
    std::uint32_t* slot_list;
    std::uint64_t* pull_list;
    std::uint64_t* push_list;
    std::int32_t num_tokens;  // of this rank; what was refused when `refuse`
    std::int32_t top_k;
    std::int32_t num_experts;
    std::int32_t num_local;
    std::int32_t max_tokens;
    std::int32_t max_blocks;
    std::int64_t chunk_limit;
    std::int64_t most_in_one;  // rows of all that are one chunk
    std::uint32_t call;        // what this launch is, see layout/routing.h
    bool one_chunk;            // the limit holds all rows that can come
    bool idx_is_64_bit;
    bool weights_are_bf16;
    bool weighted;
    bool refuse;  // signal to the other ranks that this rank does not take part
};

}  // namespace mega_moe::layout
