#pragma once
#include <cstdint>

#include "layout/host_device.h"
#include "layout/layer_shared.h"

// Which tile of the layer's GEMMs a ticket means: the order in which the clusters of a rank take tiles. A
// unit is one expert in one chunk; unit = chunk * num_local + expert. A cluster is two CTAs, and a tile of a
// cluster is a tile of kTileRows x one block of columns for each.
namespace mega_moe::layout {

// Row blocks of clusters that share a block of weights in L2 before the next block of weights is read.
inline constexpr int kRasterBlocks = 8;

// --- tiles of one unit in one GEMM with `columns` blocks of columns
// ---------------------------------------------------------------------
// Whole clusters take the rows in pairs of blocks and share the weights. Where the last pair would have one
// block only, the two CTAs share the rows instead and take two blocks of columns.
MEGA_MOE_HD_CONSTEXPR int num_pairs(int rows) {
    return rows / (2 * kTileRows) + (rows % (2 * kTileRows) > kTileRows ? 1 : 0);
}
MEGA_MOE_HD_CONSTEXPR bool has_tail(int rows) {
    return rows % (2 * kTileRows) > 0 && rows % (2 * kTileRows) <= kTileRows;
}
MEGA_MOE_HD_CONSTEXPR int num_tiles(int rows, int columns) {
    return num_pairs(rows) * columns + (has_tail(rows) ? (columns + 1) / 2 : 0);
}

// What one CTA of the cluster does.
struct CtaTile {
    int first_row;  // of the unit
    int column;     // block of columns
    bool tail;      // the CTAs share the rows and not the weights
    bool live;      // false for the second CTA of a tail whose number of columns is odd
};

MEGA_MOE_HD_CONSTEXPR CtaTile cta_tile(int index, int cta, int rows, int columns) {
    const int pairs = num_pairs(rows);
    if (index >= pairs * columns) {
        const int column = 2 * (index - pairs * columns) + cta;
        return {pairs * 2 * kTileRows, column, true, column < columns};
    }
    const int group = index / (kRasterBlocks * columns);
    const int first = group * kRasterBlocks;
    const int count = pairs - first < kRasterBlocks ? pairs - first : kRasterBlocks;
    const int within = index - first * columns;
    const int column = within / count;
    const int pair = first + (within - column * count);
    return {(2 * pair + cta) * kTileRows, column, false, true};
}

// --- order of the units
// --------------------------------------------------------------------------------------------------
// The tiles of one unit in one of the two GEMMs, with consecutive tickets.
struct TileRun {
    int unit;
    int rows;
    bool down;
    int first_ticket;
    int tiles;  // 0: there is no further run
};

// The gate/up tiles of a unit come `lag` tiles or more before its down tiles, so that those find their inputs
// ready; in between lie gate/up tiles of later units. A unit is never started before all units of the chunk
// two before its own are through, since they use the same part of the pools: a tile then waits for lower
// tickets and communication alone.
//   Rows: int operator()(int unit), rows of the unit; int next(int unit), first unit >= unit that has rows,
//   or the number of units. All CTAs of a rank walk alike.
class TileWalk {
  public:
    MEGA_MOE_HD_CONSTEXPR TileWalk(int units, int num_local, int gate_up_columns, int down_columns, int lag)
        : units_(units),
          num_local_(num_local),
          gate_up_columns_(gate_up_columns),
          down_columns_(down_columns),
          lag_(lag) {}

    // The runs in the order of their tickets.
    template <class Rows>
    MEGA_MOE_HD_CONSTEXPR TileRun next(Rows& rows) {
        if (!started_) {
            started_ = true;
            up_ = rows.next(0);
            down_ = up_;
        }
        if (down_ >= units_) return {units_, 0, false, ticket_, 0};
        const bool may_start = up_ < units_ && up_ / num_local_ <= down_ / num_local_ + 1;
        const bool down = up_ > down_ && (ahead_ >= lag_ || !may_start);
        const int unit = down ? down_ : up_;
        const int here = rows(unit);
        const TileRun run{unit, here, down, ticket_,
                          num_tiles(here, down ? down_columns_ : gate_up_columns_)};
        ticket_ += run.tiles;
        if (down) {
            down_ = rows.next(down_ + 1);
            if (down_ < up_) ahead_ -= num_tiles(rows(down_), gate_up_columns_);
        } else {
            if (up_ > down_) ahead_ += run.tiles;
            up_ = rows.next(up_ + 1);
        }
        return run;
    }

  private:
    int units_;
    int num_local_;
    int gate_up_columns_;
    int down_columns_;
    int lag_;
    int up_ = 0;     // next unit whose gate/up tiles come
    int down_ = 0;   // next unit whose down tiles come
    int ahead_ = 0;  // gate/up tiles that have come since those of `down_`
    int ticket_ = 0;
    bool started_ = false;
};

}  // namespace mega_moe::layout
