#pragma once
#include <cstdint>

#include "mega_moe/mode.h"
#include "mega_moe/status.h"

namespace mega_moe {

// Makes e4m3 copies of a weight, with one fp32 scale factor per block of 128 x 128, which serves both.
// Pointers are device addresses on `device`, aligned to 16 bytes; extents are checked by the caller. A copy
// that nobody wants is null.
struct QuantizeWeightsProblem {
    const void* weight;  // bf16 [num_experts, rows, columns]
    void* codes;         // e4m3 [num_experts, rows, columns]
    void* codes_t;       // e4m3 [num_experts, columns, rows]
    void* scales;        // fp32 [num_experts, rows / 128, columns / 128]
    std::int64_t num_experts;
    std::int64_t rows;
    std::int64_t columns;
    ScaleFormat scale_format;
    int device;
    void* stream;  // cudaStream_t
};

Status launch_quantize_weights(const QuantizeWeightsProblem& problem) noexcept;

}  // namespace mega_moe
