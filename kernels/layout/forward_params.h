#pragma once
#include <cstdint>

#include "layout/layer_params.h"
#include "layout/tensor_map.h"

namespace mega_moe::layout {

// Parameters of the fused forward. Maps name the rows of their boxes; all boxes are 128 bytes wide, but for
// those of scale factors.
struct ForwardParams : LayerParams {
    TensorMap x_load;        // x pool, rows of a tile
    TensorMap x_half_load;   // x pool, half the rows of a tile
    TensorMap h_load;        // h pool, rows of a tile
    TensorMap h_half_load;   // h pool, half the rows of a tile
    TensorMap gate_up_load;  // w_gate_up as [num_local * 2 * intermediate, hidden], 128 rows
    TensorMap down_load;     // w_down as [num_local * hidden, intermediate], 128 rows
    TensorMap h_store;       // h pool, 16 rows
    TensorMap o_store;       // o pool, 16 rows
    // Scale factors of fp8 operands, fp32.
    TensorMap x_scale_load;       // x_scale pool, rows of a tile, of kScaleBlocks k-blocks
    const float* gate_up_scales;  // [num_local, 2 * intermediate / 128, hidden / 128]
    const float* down_scales;     // [num_local, hidden / 128, intermediate / 128]
    std::byte* o_pool;            // what o_store stores to
    std::byte* h_scales;          // pool, by blocks of 128 rows: [intermediate / 128][128]
    std::int64_t gate_up_done;    // first words of the counters by kind
    std::int64_t down_done;
};

}  // namespace mega_moe::layout
