#pragma once
#include "layout/host_device.h"

// How a block of a weight lies in the shared memory of the kernel that quantizes it, on its way to the
// transposed copy.
namespace mega_moe::layout {

inline constexpr int kWeightBlock = 128;                // rows and columns that share a scale factor
inline constexpr int kPatch = 8;                        // rows and columns that one thread holds
inline constexpr int kPatches = kWeightBlock / kPatch;  // along either edge
inline constexpr int kPatchThreads = kPatches * kPatches;
inline constexpr int kTransposedBytes = kWeightBlock * kWeightBlock;

// Byte of the piece of 8 codes at `row` of the transposed block, `patch` along it. The 16 lanes that hold
// patches of the same rows write pieces of rows 8 apart; the exclusive or spreads these over all banks.
MEGA_MOE_HD_CONSTEXPR int transposed_piece(int row, int patch) {
    return row * kWeightBlock + (patch ^ row / kPatch) * kPatch;
}

// Two pieces that lie side by side in the copy do so here too, the other way round where this holds.
MEGA_MOE_HD_CONSTEXPR bool pieces_are_swapped(int row) {
    return row / kPatch % 2 != 0;
}

}  // namespace mega_moe::layout
