#pragma once
#include <cstdint>

#include "device/schedule/unit_rows.cuh"
#include "layout/backward_params.h"
#include "layout/layer_shared.h"
#include "layout/tiles.h"
#include "layout/workspace.h"

// A tile as the warps of the backward kernels pass it on.
namespace mega_moe::device {

enum BackwardKind { kEnd, kDzTile, kDxTile, kGateUpGradient, kDownGradient, kTransposeTile };

enum TileFlag {
    kToPartials = 1,    // the sum continues in a later part
    kFromPartials = 2,  // an earlier part started the sum
    kAllNan = 4,        // the call had a bad id
    kCountChunk = 8,
    kCountPart = 16,
    kSaved = 32,  // of dz: gate and up are there
};

// A tile as the scheduler passes it to the other warps of its CTA.
struct BackwardTile {
    std::int32_t kind;
    std::int32_t k_blocks;      // dz: of each of its two GEMMs
    std::int32_t pool_row;      // first row in the pools
    std::int32_t slot;          // first row, as a slot
    std::int32_t rows;          // valid rows; 0: nothing is stored
    std::int32_t weight_row;    // dz: of the gate columns, in w_gate_up; dx: of the contraction
    std::int32_t weight_row_2;  // dz: of the up columns; dx: nothing
    std::int32_t down_row;      // dz: of the contraction, in w_down
    std::int32_t column;        // first column of what is stored
    std::int32_t tail;          // the cluster shares the rows, not the weights
    std::int32_t chunk;
    std::int32_t expert;
    std::int32_t row;      // gradients: of the expert's dW; of a tile that transposes: 1 for dy
    std::int32_t partial;  // gradients: which of the sums between parts
    std::int32_t part;     // gradients: its counter of stored parts
    std::int32_t flags;    // TileFlag, of gradients but for the last
};

// How a trace numbers the tiles: block of rows in the low 16 bits, of 128 columns in the next 8. A gradient's
// rows are those of the weight.
__device__ __forceinline__ int trace_index(const BackwardTile& t, int first_row) {
    const bool gradient = t.kind == kGateUpGradient || t.kind == kDownGradient;
    return (gradient ? t.row / 128 : (t.slot + first_row) / layout::kRowBlock) | t.column / 128 << 16;
}

}  // namespace mega_moe::device
