#pragma once
#include <cstddef>
#include <cstdint>

#include "device/common/layer_facts.cuh"
#include "device/kernel/sm90_moe_forward.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/forward_math_fp8.cuh"
#include "device/sm90/smem.cuh"
#include "layout/forward_params.h"
#include "layout/saved_gate_up.h"

namespace mega_moe::device {

// Registers and shared memory of one CTA to an SM.
template <class T, Precision Wgrad, Saved S, bool Trace>
struct Sm90Fp8ForwardConfig
    : sm90::LayerFacts<LayerMode<Direction::kForward, Precision::kFp8, Wgrad, S, Trace>, T> {
    using Facts = sm90::LayerFacts<LayerMode<Direction::kForward, Precision::kFp8, Wgrad, S, Trace>, T>;
    using Smem = sm90::Smem<Sm90Fp8ForwardConfig>;
    static constexpr int kRing = layout::kTileRing;  // tiles that the scheduler is ahead at most
    static constexpr int kCommRegisters = 88;
    static constexpr int kMathRegisters = 208;  // a thread holds 128 sums and 64 partial sums
    static constexpr int kSumLoads = 4;         // of a lane of combine, 16 bytes each
    // Pieces are smaller than in bf16, each with its scale factors, and more of them are under way.
    static constexpr int kPullBuffers = 5;
    static constexpr int kPullBytes = 2048;
    static constexpr sm90::SmemOffsets kAt = sm90::smem_offsets<Facts>(kPullBuffers, kPullBytes);
    static constexpr int kSharedBytes = kAt.total;
    static constexpr int kRouteBytes = kAt.ring;

    static __device__ __forceinline__ void multiply(const layout::ForwardParams& p, const Smem& shared,
                                                    Tracer<Trace>& tracer) {
        sm90::multiply_tiles_fp8<Sm90Fp8ForwardConfig>(p, shared, tracer);
    }

    static_assert(
        Facts::kGateUpColumns == layout::kQuantGroup,
        "block_n: h is quantized by groups of layout::kQuantGroup = block_n / 2 columns, a tile at a time");
    static_assert(!Facts::kSavesGateUp || Facts::kGateUpColumns == layout::kSavedColumns,
                  "block_n: saved gate and up are laid out by layout::kSavedColumns = block_n / 2 columns");
    static_assert(Facts::kStages <= layout::kScaleBlocks * (layout::kXScaleBuffers - 1) + 1,
                  "stages: scale factors of x are loaded over those of k-blocks whose stages are released, "
                  "stages <= kScaleBlocks * (kXScaleBuffers - 1) + 1");
};

// Both GEMMs in e4m3: x is quantized before it travels, h as it is stored, each with a scale factor per
// 1x128; weights come with one per 128x128.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_forward(
    const __grid_constant__ layout::ForwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    sm90_moe_forward<C>(p, raw);
}

}  // namespace mega_moe::device
