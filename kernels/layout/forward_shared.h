#pragma once
#include "layout/host_device.h"

// Shared memory of a CTA of the fused forward, as byte offsets from a multiple of 1024, from which the 128-byte
// swizzle counts.
namespace mega_moe::layout {

inline constexpr int kStageBytesA = 64 * 128;   // 64 rows x 64 bf16
inline constexpr int kStageBytesB = 256 * 128;  // 256 rows of weights
inline constexpr int kStoreBytes = 16 * 128;    // a warp's 16 rows x 64 bf16
inline constexpr int kMathWarps = 8;
inline constexpr int kPullBuffers = 2;
inline constexpr int kPullBytes = 4096;
inline constexpr int kTileRing = 4;  // tiles that the scheduler is ahead at most
inline constexpr int kTileRecordBytes = 64;

struct ForwardShared {
    int store;
    int pull;
    int ring;
    int barriers;
    int state;  // two words
    int total;  // to ask for, whatever the start of the CTA's shared memory is
};

// The stages come first; the routing phase uses everything below `barriers` before they are filled.
MEGA_MOE_LAW ForwardShared make_forward_shared(int stages) {
    ForwardShared s{};
    s.store = stages * (kStageBytesA + kStageBytesB);
    s.pull = s.store + kMathWarps * kStoreBytes;
    s.ring = s.pull + kPullBuffers * kPullBytes;
    s.barriers = s.ring + kTileRing * kTileRecordBytes;
    // Full and empty stages, the turns of the math warpgroups, full and empty ring, pull buffers.
    s.state = s.barriers + 8 * (2 * stages + 2 + 2 * kTileRing + kPullBuffers);
    s.total = 1024 + s.state + 16;
    return s;
}

}  // namespace mega_moe::layout
