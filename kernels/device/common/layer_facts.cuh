#pragma once
#include "mega_moe/mode.h"

// What a kernel of the layer is made for, whatever the architecture: its tile, and what it computes.
namespace mega_moe::device {

// As variants.toml has it: rows and columns of a CTA's output tile, stages of its k-loop, threads of the CTA.
template <int BlockM, int BlockN, int Stages, int Threads>
struct Tile {
    static constexpr int kBlockM = BlockM;
    static constexpr int kBlockN = BlockN;
    static constexpr int kStages = Stages;
    static constexpr int kThreads = Threads;
};

template <Direction D, Precision P, Precision Wgrad, Saved S, bool Trace>
struct LayerMode {
    static constexpr Direction kDirection = D;
    static constexpr Precision kPrecision = P;
    static constexpr Precision kWgrad = Wgrad;
    static constexpr Saved kSaved = S;
    static constexpr bool kTrace = Trace;

    static constexpr bool kBackward = kDirection == Direction::kBackward;
    static constexpr bool kFp8 = kPrecision == Precision::kFp8;
    static constexpr bool kFp8Wgrad = kWgrad == Precision::kFp8;
    // Gate and up stay in memory from the forward to the backward.
    static constexpr bool kSavesGateUp = kSaved == Saved::kGateUp;
    // Rows are quantized by their own rank and travel as e4m3 with their scale factors.
    static constexpr bool kDispatchesFp8 = kFp8 && !kBackward;
    // Rows travel in bf16, for wgrad may read them so, and the rank that they come to quantizes them.
    static constexpr bool kQuantizesOnArrival = kFp8 && kBackward;
    static constexpr int kMoved = kBackward ? 2 : 1;            // tensors that are dispatched: x, dy
    static constexpr int kMovedBytes = kDispatchesFp8 ? 1 : 2;  // of an element of their rows
    static constexpr int kElementBytes = kFp8 ? 1 : 2;          // of an element of a GEMM's operands
    static_assert(kBackward == (kWgrad != Precision::kNone),
                  "wgrad is of the backward, and every backward has one");
    static_assert(kFp8 || !kFp8Wgrad, "wgrad in fp8 reads what a backward in fp8 quantizes");
};

}  // namespace mega_moe::device
