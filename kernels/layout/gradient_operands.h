#pragma once
#include <cstdint>

#include "layout/host_device.h"
#include "layout/pools.h"
#include "layout/scale_rounding.h"

// Operands of the weights' gradients in e4m3, whose contraction are the rows of an expert: dz and dy become
// rows of such a GEMM, x and h its columns. All four are kept transposed, in blocks of 128 rows of a pool
// x 128 of its columns. A block is what 128 rows or columns of a stage are, byte for byte: eight slabs of 16
// rows, each of them [128 columns][16 rows], so that 8 columns of a slab are one core matrix of wgmma without
// a swizzle, and a warp that holds 16 rows writes 2 KB in one piece.
namespace mega_moe::layout {

inline constexpr int kTransposedEdge = 128;
inline constexpr int kSlabRows = 16;
inline constexpr int kSlabBytes = kTransposedEdge * kSlabRows;
inline constexpr int kTransposedBytes = kTransposedEdge * kTransposedEdge;

// A thread holds rows r and r + 8 of its warp's 16 and writes them side by side. As the order is the same in
// every operand, the sums do not show it.
MEGA_MOE_HD_CONSTEXPR int place_in_slab(int row) {
    return row % 8 * 2 + row / 8;
}

// The block that holds (row, column) of a pool with so many columns, in bytes.
MEGA_MOE_HD_CONSTEXPR std::int64_t transposed_block(std::int64_t row, std::int64_t column,
                                                    std::int64_t columns) {
    return (row / kTransposedEdge * (columns / kTransposedEdge) + column / kTransposedEdge) *
           kTransposedBytes;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t transposed_at(std::int64_t row, std::int64_t column,
                                                 std::int64_t columns) {
    return transposed_block(row, column, columns) + row % kTransposedEdge / kSlabRows * kSlabBytes +
           column % kTransposedEdge * kSlabRows + place_in_slab(static_cast<int>(row % kSlabRows));
}

// Scale factors of 128 rows of the pools, in fp32 numbers: of each column of dz and of dy, of which a stage
// takes 128, and of each 128 columns of x and of h, of which it takes two, in 16 bytes.
struct GradientScales {
    int hidden;
    int intermediate;

    MEGA_MOE_HD_CONSTEXPR int dz() const { return 0; }
    MEGA_MOE_HD_CONSTEXPR int dy() const { return 2 * intermediate; }
    MEGA_MOE_HD_CONSTEXPR int x() const { return dy() + hidden; }
    MEGA_MOE_HD_CONSTEXPR int h() const { return x() + pairs(hidden) * kPairScales; }
    MEGA_MOE_HD_CONSTEXPR int length() const { return h() + pairs(intermediate) * kPairScales; }
    // Offset of a block of 128 columns, counted from x() or h().
    static MEGA_MOE_HD_CONSTEXPR int of_block(int block) { return block / 2 * kPairScales + block % 2; }

    static constexpr int kPairScales = 4;  // two of them unused

  private:
    static MEGA_MOE_HD_CONSTEXPR int pairs(int columns) { return (columns / kTransposedEdge + 1) / 2; }
};

// --- tiles that transpose x and dy
// ----------------------------------------------------------------------------------------------------
// 128 rows x some of the columns of either. The two CTAs of a cluster always have as many blocks.
struct TransposeTiles {
    int hidden;
    bool x;   // is wanted: an operand of the gradient of w_gate_up
    bool dy;  // of w_down

    MEGA_MOE_HD_CONSTEXPR int blocks() const {
        return hidden % (4 * kTransposedEdge) == 0 ? 4 : 2;
    }  // of one tile
    MEGA_MOE_HD_CONSTEXPR int parts() const { return hidden / kTransposedEdge / blocks(); }
    // Columns of 128 rows, as layout::cta_tile counts them.
    MEGA_MOE_HD_CONSTEXPR int columns() const {
        return (static_cast<int>(x) + static_cast<int>(dy)) * parts();
    }
    MEGA_MOE_HD_CONSTEXPR bool is_dy(int column) const { return !x || column >= parts(); }
    MEGA_MOE_HD_CONSTEXPR int first_column(int column) const {
        return column % parts() * blocks() * kTransposedEdge;
    }
};

// --- counter of the transposed rows, behind those of the backward
//   transposed  [row blocks]: warps that stored their part of a tile of the 128 rows that begin with the
//   block
inline constexpr int kTransposingWarps = 8;

}  // namespace mega_moe::layout
