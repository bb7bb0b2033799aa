#pragma once
#include <cstdint>

#include "layout/scale_rounding.h"

namespace mega_moe::layout {

// Parameters of the staging kernel. x is contiguous on both sides with equal rows, so it is one run of
// 16-byte vectors.
struct StageParams {
    const void* x;             // bf16
    void* staged_x;            // bf16 or e4m3
    float* staged_sf;          // one per 128 elements of x; unused by the copying form
    const void* topk_idx;      // int32 or int64
    const void* topk_weights;  // fp32 or bf16
    std::uint16_t* staged_idx;
    float* staged_weights;
    std::int32_t* error;       // layout::kErrorWords
    std::int64_t num_vectors;  // of x, 8 elements each
    std::uint32_t num_groups;  // of x, 128 elements each; 0 in the copying form
    std::uint32_t num_slots;   // tokens * top_k
    std::uint32_t num_slot_blocks;
    std::uint32_t top_k;
    std::int32_t num_experts;
    ScaleRounding rounding;  // unused by the copying form
    bool idx_is_64_bit;
    bool weights_are_bf16;
};

// Slots that a thread of a slot block handles, all in flight at once.
inline constexpr unsigned kSlotsPerThread = 4;

}  // namespace mega_moe::layout
