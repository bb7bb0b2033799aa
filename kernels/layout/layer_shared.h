#pragma once
#include "layout/host_device.h"
#include "layout/pools.h"
#include "layout/staging.h"

// Shared memory of a CTA of a fused kernel of the layer, as byte offsets from a multiple of 1024, from which
// the 128-byte swizzle counts.
namespace mega_moe::layout {

inline constexpr int kTileRows = 2 * kRowBlock;       // of a CTA's tile, half of them for each math warpgroup
inline constexpr int kTileColumns = 256;              // rows of weights
inline constexpr int kStageBytesA = kTileRows * 128;  // x 64 bf16 or 128 e4m3
inline constexpr int kStageBytesB = kTileColumns * 128;  // the same
inline constexpr int kStoreBytes = 16 * 128;             // a warp's 16 rows x 64 bf16 or 128 e4m3
inline constexpr int kMathWarps = 8;
inline constexpr int kPullBuffers = 4;
inline constexpr int kPullBytes = 4096;
// Beside scale factors there is room for so many.
inline constexpr int kQuantizingPullBuffers = 3;
// Rows of e4m3 come in smaller pieces, each with its scale factors, and more of them are under way.
inline constexpr int kQuantizedPullBuffers = 5;
inline constexpr int kQuantizedPullBytes = 2048;
inline constexpr int kPullScaleBytes = kQuantizedPullBytes / kQuantGroup * 4;
// Pieces that are loading or stored and not yet told, what is known of each: its slots, and one more word.
inline constexpr int kPullPieces = 7;
inline constexpr int kPullPieceBytes = (kMaxSlotsPerToken + 1) * 4;
// Scale factors of a tile's rows: of x in the forward for so many k-blocks at once, since a box of a tensor
// has rows of 16 bytes at least, twice; of others for each stage, in whose order they lie in memory.
inline constexpr int kScaleBlocks = 4;
inline constexpr int kXScaleBytes = kTileRows * kScaleBlocks * 4;
inline constexpr int kXScaleBuffers = 2;
inline constexpr int kRowScaleBytes = kTileRows * 4;
inline constexpr int kColumnScaleBytes = 16;     // of a stage's first and second 128 columns, and two unused
inline constexpr int kStoreScaleBytes = 16 * 4;  // a warp's 16 rows
inline constexpr int kTileRing = 4;              // tiles that the scheduler is ahead at most
inline constexpr int kTileRecordBytes = 64;
// Tickets on their way to the second CTA of a cluster. The first is never so far ahead: when it sends ticket
// n it has read all of tile n - kTileRing, whose stages the second must have released but for the last few.
inline constexpr int kMailbox = 16;

// What the products of a layer's kernel read, and how its rows come.
enum class LayerForm {
    kBf16,
    kFp8Forward,    // e4m3; x travels so
    kFp8Backward,   // e4m3, but for the weights' gradients; x and dy travel in bf16 and are quantized on
                    // arrival
    kFp8Gradients,  // the same with the weights' gradients in e4m3 too
};

struct LayerShared {
    int store;
    int pull;
    int x_scales;    // of the forward in fp8 alone
    int row_scales;  // of either in fp8, as the next two
    int column_scales;
    int store_scales;
    int factors;  // of gradients in e4m3: reciprocal scale factors of 256 columns
    int amax;     // twice what each warp's part of 128 x 128 elements has
    int pull_scales;
    int pieces;
    int ring;
    int mailbox;  // uint32 [kMailbox]
    int barriers;
    int num_barriers;
    int epoch;  // uint64
    int state;  // two words
    int pull_buffers;
    int pull_bytes;
    int total;  // to ask for, whatever the start of the CTA's shared memory is
};

// The stages come first; the routing phase uses everything below `ring` before they are filled.
MEGA_MOE_LAW LayerShared make_layer_shared(int stages, LayerForm form) {
    const bool quantized = form != LayerForm::kBf16;
    const bool forward = form == LayerForm::kFp8Forward;
    const bool gradients = form == LayerForm::kFp8Gradients;
    LayerShared s{};
    s.pull_buffers = forward ? kQuantizedPullBuffers : quantized ? kQuantizingPullBuffers : kPullBuffers;
    s.pull_bytes = forward ? kQuantizedPullBytes : kPullBytes;
    s.store = stages * (kStageBytesA + kStageBytesB);
    s.pull = s.store + kMathWarps * kStoreBytes;
    s.x_scales = s.pull + s.pull_buffers * s.pull_bytes;
    s.row_scales = s.x_scales + (forward ? kXScaleBuffers * kXScaleBytes : 0);
    s.column_scales = s.row_scales + (quantized ? stages * kRowScaleBytes : 0);
    s.store_scales = s.column_scales + (quantized ? stages * kColumnScaleBytes : 0);
    // With gradients in e4m3 they lie in the store buffers, which no copy may read by then anyway.
    s.factors = s.store_scales + (quantized && !gradients ? kMathWarps * kStoreScaleBytes : 0);
    s.amax = s.factors + (gradients ? kTileColumns * 4 : 0);
    s.pull_scales = s.amax + (gradients ? 2 * kMathWarps * 4 : 0);
    s.pieces = s.pull_scales + (forward ? s.pull_buffers * kPullScaleBytes : 0);
    s.ring = s.pieces + (forward ? (kPullPieces * kPullPieceBytes + 15) / 16 * 16 : 0);
    s.mailbox = s.ring + kTileRing * kTileRecordBytes;
    s.barriers = s.mailbox + kMailbox * 4;
    // Full and empty stages, full and empty ring, mailbox, pull buffers.
    s.num_barriers = 2 * stages + 2 * kTileRing + kMailbox + s.pull_buffers;
    s.epoch = s.barriers + 8 * s.num_barriers;
    s.state = s.epoch + 8;
    s.total = 1024 + s.state + 16;
    return s;
}

}  // namespace mega_moe::layout
