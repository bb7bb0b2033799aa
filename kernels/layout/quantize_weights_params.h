#pragma once
#include <cstddef>
#include <cstdint>

#include "layout/scale_rounding.h"

namespace mega_moe::layout {

// Parameters of the kernel that makes a weight's e4m3 copies. A copy that nobody wants is null.
struct QuantizeWeightsParams {
    const std::byte* weight;      // bf16 [experts, rows, columns]
    std::byte* codes;             // e4m3 [experts, rows, columns]
    std::byte* codes_transposed;  // e4m3 [experts, columns, rows]
    float* scales;                // [experts, rows / 128, columns / 128]
    std::uint32_t row_blocks;     // of 128, of one expert
    std::uint32_t column_blocks;
    ScaleRounding rounding;
};

}  // namespace mega_moe::layout
