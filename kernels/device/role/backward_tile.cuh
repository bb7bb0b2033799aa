#pragma once
#include <cstdint>

#include "device/role/backward_params.h"
#include "device/role/layer_shared.cuh"
#include "device/role/unit_rows.cuh"
#include "layout/tiles.h"
#include "layout/workspace.h"

// The backward's kernels, and what their warps tell one another of a tile.
namespace mega_moe::device {

// The scheduler decides as late as it can, since a gradient's tile takes long: it is one tile ahead.
template <int Stages, bool Trace, bool Saves>
using BackwardConfig = LayerConfig<Stages, Trace, Saves, 1, 2, 136, 184>;

// A thread of its math warps holds 128 sums and 64 partial sums, and reads what else it needs of a tile from
// the record, which it therefore keeps while the scheduler writes the next.
template <int Stages, bool Trace>
using QuantizedBackwardConfig =
    LayerConfig<Stages, Trace, false, 2, 2, 88, 208, layout::LayerForm::kFp8Backward>;

// With the weights' gradients in e4m3 too.
template <int Stages, bool Trace>
using QuantizedGradientsConfig =
    LayerConfig<Stages, Trace, false, 2, 2, 88, 208, layout::LayerForm::kFp8Gradients>;

enum BackwardKind { kEnd, kDzTile, kDxTile, kGateUpGradient, kDownGradient, kTransposeTile };

enum TileFlag {
    kToPartials = 1,    // the sum goes on in a later part
    kFromPartials = 2,  // an earlier part has begun it
    kAllNan = 4,        // the call had a bad id
    kCountChunk = 8,
    kCountTurn = 16,
    kSaved = 32,  // of dz: gate and up are there
};

// What the scheduler tells the other warps of its CTA of a tile.
struct BackwardTile {
    std::int32_t kind;
    std::int32_t k_blocks;      // dz: of each of its two products
    std::int32_t pool_row;      // first row in the pools
    std::int32_t slot;          // the same as a slot
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
    std::int32_t turn;     // gradients: word among the turns
    std::int32_t flags;    // TileFlag, of gradients but for the last
};

// How a trace numbers the tiles: block of rows in the low 16 bits, of 128 columns in the next 8. A gradient's
// rows are those of the weight.
__device__ __forceinline__ int trace_index(const BackwardTile& t, int first_row) {
    const bool gradient = t.kind == kGateUpGradient || t.kind == kDownGradient;
    return (gradient ? t.row / 128 : (t.slot + first_row) / layout::kRowBlock) | t.column / 128 << 16;
}

// Where the units of the tiles lie.
struct UnitPlace {
    int unit = -1;
    int chunk;
    int expert;
    int first_slot;
    int row_of_slot;  // row in the pools minus slot

    __device__ __forceinline__ void move(const LayerParams& p, int to) {
        if (to == unit) return;
        const RouteParams& r = p.route;
        unit = to;
        chunk = to / r.num_local;
        expert = to - chunk * r.num_local;
        first_slot = table_word(r.expert_slots, to);
        const std::int32_t* row = r.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
        row_of_slot = static_cast<int>(layout::chunk_first_row(chunk, p.pool_rows)) -
                      table_word(row, layout::kChunkFirstSlot);
    }
};

}  // namespace mega_moe::device
