#pragma once
#include "device/sm90/mma/operand.cuh"
#include "layout/layer_shared.h"
#include "layout/scale_rounding.h"

// What follows from the tile of a kernel whose GEMMs are wgmma's. One warpgroup moves data; of the others
// each multiplies 64 rows of every tile.
namespace mega_moe::device::sm90 {

// Warps of the first warpgroup, and the first of the others.
enum WarpRole { kLoadWarp, kScheduleWarp, kPullWarp, kPushWarp, kFirstMathWarp };

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kRegistersOfSm = 65536;
inline constexpr int kSharedBytesOfBlock = 232448;

constexpr bool is_power_of_two(int n) {
    return n > 0 && (n & (n - 1)) == 0;
}

constexpr int least_common_multiple(int a, int b) {
    int multiple = a;
    while (multiple % b != 0)
        multiple += a;
    return multiple;
}

template <class Mode, class T>
struct LayerFacts : Mode {
    static constexpr int kBlockM = T::kBlockM;
    static constexpr int kBlockN = T::kBlockN;
    static constexpr int kStages = T::kStages;
    static constexpr int kThreads = T::kThreads;
    static constexpr int kClusterSize = 2;
    static constexpr int kMathThreads = kThreads - kWarpgroupThreads;
    static constexpr int kMathWarps = kMathThreads / 32;
    // What a thread gets at launch, before the warpgroups redistribute it.
    static constexpr int kLaunchRegisters = kRegistersOfSm / kThreads / 8 * 8;
    static constexpr int kBlockK = kOperandRowBytes / Mode::kElementBytes;
    static constexpr int kBytesA = kBlockM * kOperandRowBytes;
    static constexpr int kBytesB = kBlockN * kOperandRowBytes;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    // A tile of gate and up has as many columns of either; so many columns of h are made of it.
    static constexpr int kGateUpColumns = kBlockN / 2;
    // An accumulator's elements in each thread of a warpgroup: 64 rows x block_n.
    static constexpr int kSums = 64 * kBlockN / kWarpgroupThreads;

    // hidden must be whole tiles of columns, whole steps of combine, whole k-blocks; where rows travel as
    // e4m3, their scale factors are whole vectors of 16 bytes.
    static constexpr int kHiddenMultiple =
        least_common_multiple(least_common_multiple(kBlockN, layout::kCombineColumns),
                              Mode::kDispatchesFp8 ? 4 * layout::kQuantGroup : kBlockK);
    // intermediate must be whole tiles of h, whole k-blocks, and two of bf16, in the second of which a math
    // warp signals what it stored before.
    static constexpr int kIntermediateMultiple =
        least_common_multiple(kGateUpColumns, Mode::kFp8 ? kBlockK : 2 * kBlockK);

    static_assert(kBlockM == layout::kTileRows,
                  "block_m: tiles, row blocks and scale factors of the pools are laid out for 128 rows");
    static_assert(kMathThreads * 64 == kBlockM * kWarpgroupThreads,
                  "threads: 128 + 128 for each 64 rows of block_m");
    static_assert(kBlockN % 128 == 0 && kBlockN <= 256,
                  "block_n: half of it is whole blocks of 64 columns, and wgmma takes 256 at most");
    static_assert(kStages >= 2,
                  "stages: one is released when the MMAs of the next are in flight, stages >= 2");
    static_assert(
        layout::kTileRing + kStages < layout::kMailbox,
        "stages: tickets on their way within a cluster, layout::kTileRing + stages < layout::kMailbox");
};

}  // namespace mega_moe::device::sm90
