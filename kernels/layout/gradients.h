#pragma once
#include <cstdint>

#include "layout/host_device.h"
#include "layout/pools.h"

// Tiles of the weights' gradients: dW = sum over an expert's rows. Each cluster tile is two neighboring
// blocks of 128 rows of dW, one for each CTA, x 256 columns. An expert's rows are summed in parts: those of
// one chunk, and of a chunk at most kPartRows at a time, so that one expert with most of the rows still keeps
// every cluster busy. The parts of a tile are added in this order, each after the one before it, in fp32.
namespace mega_moe::layout {

inline constexpr int kPartRows = 16384;
inline constexpr int kGradientRows = 256;  // of dW, of a cluster tile
inline constexpr int kGradientColumns = 256;
// Warps that count a cluster tile when they have stored it.
inline constexpr int kGradientWarps = 16;

MEGA_MOE_HD_CONSTEXPR int num_parts(int rows) {
    return (rows + kPartRows - 1) / kPartRows;
}

// Which gradients are wanted, and their tiles for one expert: dw_gate_up [2 * intermediate, hidden] first,
// then dw_down [hidden, intermediate], whose last column of tiles may be half empty.
struct GradientTiles {
    int hidden;
    int intermediate;
    bool gate_up;
    bool down;

    MEGA_MOE_HD_CONSTEXPR int gate_up_pairs() const { return 2 * intermediate / kGradientRows; }
    MEGA_MOE_HD_CONSTEXPR int down_pairs() const { return hidden / kGradientRows; }
    MEGA_MOE_HD_CONSTEXPR int gate_up_tiles() const {
        return gate_up ? gate_up_pairs() * (hidden / kGradientColumns) : 0;
    }
    MEGA_MOE_HD_CONSTEXPR int down_tiles() const {
        return down ? down_pairs() * ((intermediate + kGradientColumns - 1) / kGradientColumns) : 0;
    }
    MEGA_MOE_HD_CONSTEXPR int tiles() const { return gate_up_tiles() + down_tiles(); }
};

// What a CTA does of a cluster tile.
struct GradientTile {
    bool down;
    int row;  // of the expert's dW
    int column;
};

// Neighbors differ in their rows, so that clusters that start together read the same columns.
MEGA_MOE_HD_CONSTEXPR GradientTile gradient_tile(const GradientTiles& g, int index, int cta) {
    const bool down = index >= g.gate_up_tiles();
    const int within = down ? index - g.gate_up_tiles() : index;
    const int pairs = down ? g.down_pairs() : g.gate_up_pairs();
    const int column = within / pairs;
    const int pair = within - column * pairs;
    return {down, pair * kGradientRows + cta * (kGradientRows / 2), column * kGradientColumns};
}

// --- order of the parts
// ------------------------------------------------------------------------------------------------------
// The tiles of one part, with consecutive tickets.
struct GradientRun {
    int unit;       // chunk * num_local + expert
    int first_row;  // of the unit
    int rows;       // 0: an expert without a row, whose gradient is zero
    int ordinal;    // of the part among those of its expert
    bool last;      // of its expert
    int partial;    // where the expert's sums are kept between its parts, when it has several
    int first_ticket;
    int tiles;  // 0: there is no further run
};

// Parts in the order of their units, so that experts are taken in the order in which they are finished. A
// tile waits for rows that were signaled, and for the part before its own, whose tickets are lower.
//   Rows: int operator()(int unit), rows of the unit. All CTAs of a rank walk alike.
class GradientWalk {
  public:
    // `zeros`: experts without rows get tiles, which write zeros.
    MEGA_MOE_HD_CONSTEXPR GradientWalk(int chunks, int num_local, int tiles, bool zeros)
        : chunks_(chunks), num_local_(num_local), tiles_(tiles), zeros_(zeros) {}

    // The runs in the order of their tickets.
    template <class Rows>
    MEGA_MOE_HD_CONSTEXPR GradientRun next(Rows& rows) {
        const int units = tiles_ > 0 ? chunks_ * num_local_ : 0;
        while (unit_ < units) {
            if (part_ == 0) begin(rows);
            if (part_ >= parts_) {
                finish();
                continue;
            }
            const int first = part_ * kPartRows;
            const int left = rows_ - first;
            const GradientRun run{unit_,
                                  first,
                                  left < kPartRows ? left : kPartRows,
                                  before_ + part_,
                                  part_ + 1 == parts_ && after_ == 0,
                                  partial_,
                                  ticket_,
                                  tiles_};
            ticket_ += tiles_;
            if (++part_ == parts_) finish();
            return run;
        }
        return {units, 0, 0, 0, false, 0, ticket_, 0};
    }

  private:
    template <class Rows>
    MEGA_MOE_HD_CONSTEXPR void begin(Rows& rows) {
        const int chunk = unit_ / num_local_;
        const int expert = unit_ - chunk * num_local_;
        rows_ = rows(unit_);
        parts_ = num_parts(rows_);
        before_ = 0;
        after_ = 0;
        for (int other = 0; other < chunks_; ++other) {
            if (other == chunk) continue;
            (other < chunk ? before_ : after_) += num_parts(rows(other * num_local_ + expert));
        }
        // The first unit of an expert without any rows stands for it.
        if (zeros_ && chunk == 0 && parts_ == 0 && after_ == 0) parts_ = 1;
        partial_ = chunks_ > 1 ? expert : several_;
    }
    MEGA_MOE_HD_CONSTEXPR void finish() {
        if (parts_ > 1) ++several_;
        part_ = 0;
        ++unit_;
    }

    int chunks_;
    int num_local_;
    int tiles_;
    bool zeros_;
    int unit_ = 0;
    int part_ = 0;     // next part of the unit
    int parts_ = 0;    // of the unit
    int rows_ = 0;     // of the unit
    int before_ = 0;   // parts of the expert in chunks before
    int after_ = 0;    // and after
    int partial_ = 0;  // of the unit
    int several_ = 0;  // experts so far that have several parts, with one chunk
    int ticket_ = 0;
};

// Experts whose sums may have to be kept between parts.
MEGA_MOE_HD_CONSTEXPR std::int64_t max_partials(std::int64_t max_rows, std::int64_t chunks,
                                                std::int64_t num_local) {
    if (chunks > 1) return num_local;
    const std::int64_t longest = max_rows / (kPartRows + 1);
    return longest < num_local ? longest : num_local;
}

// Cluster tiles of one expert, wanted or not.
MEGA_MOE_HD_CONSTEXPR std::int64_t all_gradient_tiles(std::int64_t hidden, std::int64_t intermediate) {
    return hidden / kGradientColumns *
           (2 * intermediate / kGradientRows + (intermediate + kGradientColumns - 1) / kGradientColumns);
}

// --- counters of the backward, after those of both directions
// ------------------------------------------------------------------------
//   gradients_done  [max_chunks]: warps that are through with their part of a tile of the chunk's units that
//   have
//                   rows
//   parts           [num_local][all_gradient_tiles]: warps that stored a part of the tile; without several
//   parts
//                   none
MEGA_MOE_HD_CONSTEXPR std::int64_t counter_of_gradients_done(std::int64_t max_slots,
                                                             std::int64_t max_chunks) {
    return (num_counters(max_slots, max_chunks) + kCounterLine - 1) / kCounterLine * kCounterLine;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t counter_of_parts(std::int64_t max_slots, std::int64_t max_chunks) {
    return counter_of_gradients_done(max_slots, max_chunks) +
           (max_chunks + kCounterLine - 1) / kCounterLine * kCounterLine;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t num_backward_counters(std::int64_t max_slots, std::int64_t max_chunks,
                                                         std::int64_t num_local, std::int64_t tiles,
                                                         bool parts) {
    return counter_of_parts(max_slots, max_chunks) + (parts ? num_local * tiles : 0);
}

}  // namespace mega_moe::layout
