#pragma once
#include <cstdint>

#include "layout/host_device.h"

// A fault as a rank's kernels report it to the host: one record in pinned memory.
namespace mega_moe::layout {

enum RecordWord {
    kRecordState,  // 1 once the others are written; the host clears it
    kRecordRank,   // the rank that writes
    kRecordRole,
    kRecordKind,
    kRecordIndex,
    kRecordSeen,
    kRecordWanted,
    kRecordEpoch,  // number of the launch
    kRecordWords
};

enum class Role : std::uint64_t {
    kPublish = 1,      // index: token * top_k + slot
    kHeader = 2,       // index: rank whose launch is awaited
    kBlockFlag = 3,    // index: rank * max_blocks + block whose ids are awaited
    kGridBarrier = 4,  // index: CTA that waits for the others of its rank
    kPullSource = 5,   // index: rank * max_blocks + block whose x is awaited
    kTileInput = 6,    // index: block of rows that a tile reads
    kPushInput = 7,    // index: entry of push_list whose outputs are awaited
    kOwnerSum = 8,     // index: own token whose sums of other ranks are awaited
    kChunkFree = 9,    // index: chunk whose part of the pools is awaited
    kLastSums = 10,    // index: rank * max_blocks + block whose sums are awaited before the launch ends
};

enum class Kind : std::uint64_t {
    kBadId = 1,     // seen: the id; wanted: number of experts. The slot is masked and the launch goes on.
    kRefused = 2,   // index: rank that refused the call; seen: its tokens; wanted: the capacity
    kArrival = 3,   // a rank did not launch in time; seen, wanted: launches
    kProgress = 4,  // all had launched, and then something did not come in time
    kAborted = 5,   // another rank gave up; seen: its abort word
    kMismatch = 6,  // index: rank that calls something else; seen, wanted: its call and the own one
};

// Not zero. What the rank that gave up was waiting for.
MEGA_MOE_HD_CONSTEXPR std::uint64_t encode_abort(std::uint64_t rank, Role role, Kind kind,
                                                 std::uint64_t index) {
    return (rank + 1) | static_cast<std::uint64_t>(kind) << 8 | static_cast<std::uint64_t>(role) << 16 |
           index << 32;
}

}  // namespace mega_moe::layout
