#pragma once
#include <cstddef>
#include <cstdint>

#include "device/common/layer_facts.cuh"
#include "device/kernel/sm90_moe_forward.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/forward_math.cuh"
#include "device/sm90/smem.cuh"
#include "layout/forward_params.h"
#include "layout/saved_gate_up.h"

namespace mega_moe::device {

// Registers and shared memory of one CTA to an SM.
template <class T, Precision Wgrad, Saved S, bool Trace>
struct Sm90Bf16ForwardConfig
    : sm90::LayerFacts<LayerMode<Direction::kForward, Precision::kBf16, Wgrad, S, Trace>, T> {
    using Facts = sm90::LayerFacts<LayerMode<Direction::kForward, Precision::kBf16, Wgrad, S, Trace>, T>;
    using Smem = sm90::Smem<Sm90Bf16ForwardConfig>;
    static constexpr int kRing = layout::kTileRing;  // tiles that the scheduler is ahead at most
    static constexpr int kCommRegisters = 136;
    static constexpr int kMathRegisters = 184;
    static constexpr int kSumLoads = 8;  // of a lane of combine, 16 bytes each
    static constexpr int kPullBuffers = 4;
    static constexpr int kPullBytes = 4096;
    static constexpr sm90::SmemOffsets kAt = sm90::smem_offsets<Facts>(kPullBuffers, kPullBytes);
    static constexpr int kSharedBytes = kAt.total;
    static constexpr int kRouteBytes = kAt.ring;

    static __device__ __forceinline__ void multiply(const layout::ForwardParams& p, const Smem& shared,
                                                    Tracer<Trace>& tracer) {
        sm90::multiply_tiles<Sm90Bf16ForwardConfig>(p, shared, tracer);
    }

    static_assert(!Facts::kSavesGateUp || Facts::kGateUpColumns == layout::kSavedColumns,
                  "block_n: saved gate and up are laid out by layout::kSavedColumns = block_n / 2 columns");
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_bf16_moe_forward(
    const __grid_constant__ layout::ForwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    sm90_moe_forward<C>(p, raw);
}

}  // namespace mega_moe::device
