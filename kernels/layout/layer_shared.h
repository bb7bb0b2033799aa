#pragma once
#include "layout/host_device.h"
#include "layout/pools.h"
#include "layout/scale_rounding.h"

// What the parts of a fused kernel of the layer agree on, whatever the architecture.
namespace mega_moe::layout {

inline constexpr int kTileRows = 2 * kRowBlock;  // of a CTA's tile, half of them for each math warpgroup
// Warps of a warpgroup: so many store a row block's part of a tile, and each counts it.
inline constexpr int kStoringWarps = 4;
inline constexpr int kWarpRows = kRowBlock / kStoringWarps;
// Columns that a warp of combine sums in one step, 16 bytes a lane.
inline constexpr int kCombineColumns = 256;
// Columns of h whose part of a routing weight's gradient is one number.
inline constexpr int kDtopkColumns = 128;
// Pieces that are loading or stored and not yet signalled, what is known of each: its slots, and one more
// word.
inline constexpr int kPullPieces = 7;
inline constexpr int kPullPieceBytes = (kMaxSlotsPerToken + 1) * 4;
// Scale factors of a tile's rows: of x in the forward for so many k-blocks at once, since a box of a tensor
// has rows of 16 bytes at least, twice; of others for each stage, in whose order they lie in memory.
inline constexpr int kScaleBlocks = 4;
inline constexpr int kXScaleBytes = kTileRows * kScaleBlocks * 4;
inline constexpr int kXScaleBuffers = 2;
inline constexpr int kRowScaleBytes = kTileRows * 4;
inline constexpr int kTileRing = 4;  // tiles that the scheduler is ahead at most
inline constexpr int kTileRecordBytes = 64;
// Tickets on their way to the second CTA of a cluster. The first is never so far ahead: when it sends ticket
// n it has read all of tile n - kTileRing, whose stages the second must have released but for the last few.
inline constexpr int kMailbox = 16;

}  // namespace mega_moe::layout
