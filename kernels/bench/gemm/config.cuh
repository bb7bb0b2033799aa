#pragma once
#include <cstdint>

#include "device/sm90/mma/operand.cuh"

namespace mega_moe::bench {

enum class Element { kBf16, kE4m3 };
// Cooperative: both consumer warpgroups take half of each tile. Ping-pong: they alternate over whole tiles,
// one multiplying while the other stores.
enum class Schedule { kCooperative, kPingPong };
enum class Cluster { kNone, kMulticastB };  // two blocks along M that load half of b's tile each, for both
// 1x128 of a, 128x128 of b; sums leave the tensor core every 128: half of the columns after the other, or a
// quarter while the next is multiplied, with a pause after each stage or after two.
enum class Promotion { kNone, kHalves, kQuarters, kQuartersOfTwo };

template <Element E, int M, int N, int InstructionN, Schedule S, Cluster C, device::sm90::Major A,
          device::sm90::Major B, Promotion P, int Stages, int StoreBuffers>
struct GemmConfig {
    static constexpr Element kElement = E;
    static constexpr int kBlockM = M;
    static constexpr int kBlockN = N;
    static constexpr int kInstructionN = InstructionN;
    static constexpr bool kPingPong = S == Schedule::kPingPong;
    static constexpr int kClusterSize = C == Cluster::kNone ? 1 : 2;
    static constexpr device::sm90::Major kMajorA = A;
    static constexpr device::sm90::Major kMajorB = B;
    static constexpr bool kPromoted = P != Promotion::kNone;
    static constexpr bool kStaggered = kPromoted && P != Promotion::kHalves;
    static constexpr int kBlocksAtOnce = P == Promotion::kQuartersOfTwo ? 2 : 1;
    static constexpr int kStages = Stages;
    static constexpr int kStoreBuffers = StoreBuffers;

    // 128 bytes of the contraction, one row of the swizzle.
    static constexpr int kBlockK = E == Element::kBf16 ? 64 : 128;
    static constexpr int kInstructionsK = 4;

    static constexpr int kThreads = 384;  // a warpgroup that loads, two that multiply
    static constexpr int kWarpgroupRows = kPingPong ? M : M / 2;
    static constexpr int kPartsM = kWarpgroupRows / 64;
    // The staggered form adds to one array from smaller MMAs.
    static constexpr int kPartsN = kStaggered ? 1 : N / InstructionN;
    static constexpr int kParts = kPartsM * kPartsN;
    static constexpr int kPartRegisters = (kStaggered ? N : InstructionN) / 2;

    // Halves spill with 216 and 72 and with 200 and 104, quarters with 208 and 88.
    static constexpr int kLoadRegisters = kStaggered ? 72 : kPromoted ? 88 : 40;
    static constexpr int kMultiplyRegisters = kStaggered ? 216 : kPromoted ? 208 : 232;
    static_assert(128 * kLoadRegisters + 256 * kMultiplyRegisters <= kThreads * 168, "registers at launch");

    static constexpr int kBytesA = M * device::sm90::kOperandRowBytes;
    static constexpr int kBytesB = N * device::sm90::kOperandRowBytes;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    static constexpr int kScaleBytes = kPromoted ? M * 4 : 0;
    static constexpr int kStoreBytes = 16 * device::sm90::kOperandRowBytes;  // a warp's 16 rows of 64 bf16

    static constexpr int kStoreOffset = kStages * kStageBytes;
    static constexpr int kScaleOffset = kStoreOffset + 8 * kStoreBuffers * kStoreBytes;
    static constexpr int kBarrierOffset = kScaleOffset + kStages * kScaleBytes;
    static constexpr int kNumBarriers = 2 * kStages + 2;  // full, empty, the order of ping-pong
    // The swizzle counts from multiples of 1024.
    static constexpr int kSharedBytes = 1024 + kBarrierOffset + 8 * kNumBarriers;
    static_assert(kSharedBytes <= 232448, "shared memory of a block");

    static_assert(E == Element::kBf16 || (A == device::sm90::Major::kK && B == device::sm90::Major::kK),
                  "e4m3 is K-major only");
    static_assert(!kPromoted || (E == Element::kE4m3 && !kPingPong && N == 256 &&
                                 InstructionN == (kStaggered ? 64 : 128)),
                  "promoted form");
    static_assert(kParts * kPartRegisters == 128, "accumulators per thread");
};

}  // namespace mega_moe::bench
