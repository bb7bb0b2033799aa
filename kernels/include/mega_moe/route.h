#pragma once
#include <cstdint>

#include "mega_moe/status.h"

namespace mega_moe {

// What the memory of the routing tables depends on. Equal on all ranks.
struct RouteShape {
    std::int64_t max_tokens;
    std::int64_t top_k;
    std::int64_t num_experts;
    std::int64_t hidden;
    std::int64_t intermediate;  // 0: tables alone, no pools
    std::int64_t num_ranks;
    std::int64_t pool_rows;   // padded rows of one of the pools
    bool quantize;            // x is staged as e4m3
    bool home;                // with home slots
    bool canaries;            // with untouched bytes between parts
    bool backward;            // with what the backward needs besides
    bool quantize_backward;   // and what the backward in fp8 needs beside that
    bool quantize_gradients;  // with weights' gradients in fp8 too
};

struct NamedPart {
    const char* name;
    std::int64_t offset;
    std::int64_t bytes;
};

inline constexpr int kMaxLayoutParts = 40;

// Parts of a buffer in order; the rest of the array is unused.
struct LayoutTable {
    NamedPart parts[kMaxLayoutParts];
    int count;
    std::int64_t total;
};

// The part of each rank that its peers reach; and the rank's own memory. Both 256-byte aligned and zero at
// first.
LayoutTable symmetric_layout(const RouteShape& shape) noexcept;
LayoutTable workspace_layout(const RouteShape& shape) noexcept;
// Padded rows that the smallest and the largest useful pool have: one block of tokens, and everything at
// once.
std::int64_t smallest_pool_rows(const RouteShape& shape) noexcept;
std::int64_t largest_pool_rows(const RouteShape& shape) noexcept;
// int32 words that a launch reports, and those of a record in pinned memory, which are int64.
std::int64_t route_summary_length(const RouteShape& shape) noexcept;
std::int64_t route_record_words() noexcept;

// Builds the routing tables of one rank. All pointers are device addresses on `device`, `record` excepted,
// which is pinned host memory. Extents and peers are checked by the caller.
struct RouteProblem {
    RouteShape shape;
    const void* topk_idx;         // int32 or int64 [num_tokens, top_k]
    const void* topk_weights;     // fp32 or bf16 [num_tokens, top_k]; unused unless `weighted`
    std::int32_t* summary;        // route_summary_length words
    const std::int64_t* buffers;  // [num_ranks]: addresses of the symmetric buffers
    void* workspace;
    void* record;
    std::int64_t num_tokens;
    std::int64_t rank;
    std::int64_t num_sms;  // CTAs at most; 0: all SMs
    std::int64_t arrival_ns;
    std::int64_t progress_ns;
    bool idx_is_64_bit;
    bool weights_are_bf16;
    bool weighted;  // the slots get weights; equal on all ranks
    bool refuse;    // take no part, and tell the others: num_tokens is over max_tokens
    int device;
    void* stream;  // cudaStream_t
};

Status launch_route(const RouteProblem& problem) noexcept;

}  // namespace mega_moe
