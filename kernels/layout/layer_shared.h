#pragma once
#include "layout/host_device.h"
#include "layout/pools.h"

// Shared memory of a CTA of a fused kernel of the layer, as byte offsets from a multiple of 1024, from which
// the 128-byte swizzle counts.
namespace mega_moe::layout {

inline constexpr int kTileRows = 2 * kRowBlock;       // of a CTA's tile, half of them for each math warpgroup
inline constexpr int kTileColumns = 256;              // rows of weights
inline constexpr int kStageBytesA = kTileRows * 128;  // x 64 bf16
inline constexpr int kStageBytesB = kTileColumns * 128;  // x 64 bf16
inline constexpr int kStoreBytes = 16 * 128;             // a warp's 16 rows x 64 bf16
inline constexpr int kMathWarps = 8;
inline constexpr int kPullBuffers = 4;
inline constexpr int kPullBytes = 4096;
inline constexpr int kTileRing = 4;  // tiles that the scheduler is ahead at most
inline constexpr int kTileRecordBytes = 64;
// Tickets on their way to the second CTA of a cluster. The first is never so far ahead: when it sends ticket
// n it has read all of tile n - kTileRing, whose stages the second must have released but for the last few.
inline constexpr int kMailbox = 16;

struct LayerShared {
    int store;
    int pull;
    int ring;
    int mailbox;  // uint32 [kMailbox]
    int barriers;
    int num_barriers;
    int epoch;  // uint64
    int state;  // two words
    int total;  // to ask for, whatever the start of the CTA's shared memory is
};

// The stages come first; the routing phase uses everything below `ring` before they are filled.
MEGA_MOE_LAW LayerShared make_layer_shared(int stages) {
    LayerShared s{};
    s.store = stages * (kStageBytesA + kStageBytesB);
    s.pull = s.store + kMathWarps * kStoreBytes;
    s.ring = s.pull + kPullBuffers * kPullBytes;
    s.mailbox = s.ring + kTileRing * kTileRecordBytes;
    s.barriers = s.mailbox + kMailbox * 4;
    // Full and empty stages, full and empty ring, mailbox, pull buffers.
    s.num_barriers = 2 * stages + 2 * kTileRing + kMailbox + kPullBuffers;
    s.epoch = s.barriers + 8 * s.num_barriers;
    s.state = s.epoch + 8;
    s.total = 1024 + s.state + 16;
    return s;
}

}  // namespace mega_moe::layout
