#pragma once
#include <cstdint>

#include "layout/gradient_operands.h"
#include "layout/gradients.h"
#include "layout/layer_params.h"
#include "layout/tensor_map.h"

namespace mega_moe::layout {

// Where the gradient of one weight goes.
struct GradientTarget {
    std::byte* out;     // the caller's, bf16 or fp32 [num_local * rows, columns]
    float* partials;    // first of the expert's sums between parts; see layout::kPartials
    std::int32_t rows;  // of one expert
    std::int32_t columns;
};

// Parameters of the fused backward. Maps with one number name the rows of their boxes, which are 64 columns
// wide and K-major; maps of blocks have boxes of 64 rows x 64 columns x blocks of 64 columns, which land
// MN-major. In fp8 the maps of rows that are loaded are of e4m3, 128 columns wide, and w_down is its
// transposed copy [num_local * intermediate, hidden].
struct BackwardParams : LayerParams {
    TensorMap x_load;       // x pool, rows of a tile
    TensorMap x_half_load;  // x pool, half the rows of a tile
    TensorMap dy_load;      // dy pool
    TensorMap dy_half_load;
    TensorMap dz_load;  // dz pool
    TensorMap dz_half_load;
    TensorMap gate_up_load;    // w_gate_up as [num_local * 2 * intermediate, hidden], 128 rows
    TensorMap down_load;       // w_down as [num_local * hidden, intermediate], 64 rows: one block
    TensorMap gate_up_blocks;  // w_gate_up, two blocks; in fp8 its transposed copy, 128 rows
    TensorMap x_blocks;        // pools, two blocks
    TensorMap dy_blocks;
    TensorMap dz_blocks;
    TensorMap h_blocks;
    TensorMap dz_store;          // dz pool, 16 rows
    TensorMap h_store;           // h pool, 16 rows
    TensorMap dx_store;          // dx pool, 16 rows
    TensorMap dw_gate_up_store;  // bf16 gradients, 16 rows
    TensorMap dw_down_store;
    // In fp8.
    const float* gate_up_scales;  // [num_local, 2 * intermediate / 128, hidden / 128]
    const float* down_scales;     // [num_local, hidden / 128, intermediate / 128]
    const std::byte* x_scales;    // pools, by blocks of 128 rows: [hidden / 128][128]
    const std::byte* dy_scales;   // of the dy pool, laid out as x_scales
    std::byte* dz_scales;         // of the dz pool: [2 * intermediate / 128][128]
    std::byte* dz_codes;          // pool [2 * intermediate] in e4m3
    std::byte* dz_pool;           // what dz_store stores to, and so on
    std::byte* h_pool;
    std::byte* dx_pool;
    // With weights' gradients in e4m3; dz and h are in their pools. See layout/gradient_operands.h.
    std::byte* x_transposed;
    std::byte* dy_transposed;
    float* gradient_scales;       // of each 128 rows
    std::int64_t transposed;      // first word of its counters
    std::int64_t partial_stride;  // elements of an expert's sums between parts
    GradientTarget dw_gate_up;
    GradientTarget dw_down;
    float* dtopk_parts;        // fp32 [pool rows, intermediate / 128]
    float* dtopk;              // the caller's, fp32 [num_tokens, top_k]
    std::int64_t owner_dtopk;  // offset in each rank's symmetric buffer
    std::int64_t dz_done;      // first words of the counters by kind
    std::int64_t dx_done;
    std::int64_t gradients_done;
    std::int64_t parts;
    GradientTiles gradients;  // which are wanted
    bool needs_dx;            // on all ranks alike, as the next
    bool needs_dtopk;
    bool gradients_are_fp32;
    TransposeTiles transposes;
    bool accumulate;  // add to what `out` of the weights' gradients holds
};
static_assert(sizeof(BackwardParams) <= 4096, "parameters of a kernel");

}  // namespace mega_moe::layout
