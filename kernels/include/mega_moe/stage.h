#pragma once
#include <cstdint>

#include "mega_moe/status.h"

namespace mega_moe {

// Byte offsets of the parts of a staging area, from its start. A part that a configuration does not use is
// empty.
struct StagingOffsets {
    std::int64_t x;
    std::int64_t x_sf;
    std::int64_t topk_idx;
    std::int64_t topk_weights;
    std::int64_t error;
    std::int64_t total;
};

StagingOffsets staging_offsets(std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden,
                               bool quantize) noexcept;

// Copies a rank's tokens, expert ids and routing weights into its staging area; with `quantize`, x becomes
// e4m3 with one fp32 scale factor per 1x128. All pointers are device addresses on `device`; extents are
// checked by the caller.
struct StageProblem {
    const void* x;             // bf16 [num_tokens, hidden], 16-byte aligned
    const void* topk_idx;      // int32 or int64 [num_tokens, top_k]
    const void* topk_weights;  // fp32 or bf16 [num_tokens, top_k]
    void* buffer;              // staging_offsets(...).total bytes, 256-byte aligned
    std::int64_t num_tokens;
    std::int64_t max_tokens;
    std::int64_t hidden;
    std::int64_t top_k;
    std::int64_t num_experts;
    bool idx_is_64_bit;
    bool weights_are_bf16;
    bool quantize;
    bool power_of_two;  // round scale factors up to one
    int device;
    void* stream;  // cudaStream_t
};

Status launch_stage(const StageProblem& problem) noexcept;

}  // namespace mega_moe
