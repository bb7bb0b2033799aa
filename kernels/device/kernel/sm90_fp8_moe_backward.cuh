#pragma once
#include <cstddef>
#include <cstdint>

#include "device/common/layer_facts.cuh"
#include "device/kernel/sm90_moe_backward.cuh"
#include "device/sm90/backward_math_fp8.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/smem.cuh"
#include "layout/backward_params.h"
#include "layout/saved_gate_up.h"

namespace mega_moe::device {

// Registers and shared memory of one CTA to an SM.
template <class T, Precision Wgrad, Saved S, bool Trace>
struct Sm90Fp8BackwardConfig
    : sm90::LayerFacts<LayerMode<Direction::kBackward, Precision::kFp8, Wgrad, S, Trace>, T> {
    using Facts = sm90::LayerFacts<LayerMode<Direction::kBackward, Precision::kFp8, Wgrad, S, Trace>, T>;
    using Smem = sm90::Smem<Sm90Fp8BackwardConfig>;
    // A math warp reads what it needs of a tile from the record, which it keeps while the scheduler writes
    // the next.
    static constexpr int kRing = 2;
    static constexpr int kCommRegisters = 88;
    static constexpr int kMathRegisters = 208;  // a thread holds 128 sums and 64 partial sums
    static constexpr int kSumLoads = 4;         // of a lane of combine, 16 bytes each
    static constexpr int kPullBuffers = 3;      // scale factors leave no room for more
    static constexpr int kPullBytes = 4096;
    static constexpr sm90::SmemOffsets kAt = sm90::smem_offsets<Facts>(kPullBuffers, kPullBytes);
    static constexpr int kSharedBytes = kAt.total;
    static constexpr int kRouteBytes = kAt.ring;

    static __device__ __forceinline__ void multiply(const layout::BackwardParams& p, const Smem& shared,
                                                    Tracer<Trace>& tracer) {
        sm90::Fp8BackwardMath<Sm90Fp8BackwardConfig>(p, shared).run(tracer);
    }

    static_assert(!Facts::kSavesGateUp || Facts::kGateUpColumns == layout::kSavedColumns,
                  "block_n: saved gate and up are laid out by layout::kSavedColumns = block_n / 2 columns");
};

// Recompute, dz and dx in e4m3: x and dy travel in bf16 and are quantized as they arrive, dz as it is stored,
// each with a scale factor per 1x128. wgrad reads bf16, or e4m3 with a scale factor per 128 rows.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_backward(
    const __grid_constant__ layout::BackwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    sm90_moe_backward<C>(p, raw);
}

}  // namespace mega_moe::device
