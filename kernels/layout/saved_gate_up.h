#pragma once
#include <cstdint>

#include "layout/layer_shared.h"

// Where gate and up of a rank's rows lie when the forward saves them for the backward: as a math warp holds
// them, so that both directions move them between registers and global memory without a detour, in whole
// lines. By kRowBlock slots, then 128 features: [warp of the warpgroup][vector][lane][8 bf16].
namespace mega_moe::layout {

inline constexpr int kSavedColumns =
    128;  // of gate, and as many of up, which a math warp holds of its 16 rows
// 16-byte vectors that a lane saves: half of them gate, half of them up.
inline constexpr int kSavedVectors = 16 * 2 * kSavedColumns / 32 / 8;
inline constexpr int kSavedVectorBytes = 32 * 16;  // of all lanes

// Bytes before what a lane of one of a warpgroup's warps holds, whose vectors lie kSavedVectorBytes apart.
// `slot` is that of the warpgroup's first row, `column` the tile's of `columns` blocks of 128 features.
MEGA_MOE_HD_CONSTEXPR std::int64_t saved_offset(int slot, int column, int columns, int warp, int lane) {
    const std::int64_t block = std::int64_t{slot / kRowBlock} * columns + column;
    return (block * 4 + warp) * (kSavedVectors * kSavedVectorBytes) + lane * 16;
}

// Whether there is room for the rows of the tile at `slot`; what lies beyond is recomputed.
MEGA_MOE_HD_CONSTEXPR bool is_saved(int slot, int saved_slots) {
    return slot + kTileRows <= saved_slots;
}

}  // namespace mega_moe::layout
