#pragma once
#include <cstddef>
#include <cstdint>

#include "device/combine/combine.cuh"
#include "device/common/layer_facts.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/poison.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/forward.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/forward_load.cuh"
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

    static_assert(
        sm90::kWarpgroupThreads * kCommRegisters + Facts::kMathThreads * kMathRegisters <=
            Facts::kThreads * Facts::kLaunchRegisters,
        "registers: 128 * kCommRegisters + (threads - 128) * kMathRegisters <= threads * kLaunchRegisters");
    static_assert(Facts::kStages * Facts::kStageBytes + Facts::kMathWarps * sm90::kStoreBytes +
                          kPullBuffers * kPullBytes + (kAt.ring - kAt.x_scales) + (kAt.total - kAt.ring) <=
                      sm90::kSharedBytesOfBlock,
                  "shared memory: stages * 128 * (block_m + block_n) + math warps * 2048 + pull buffers * "
                  "2048 + scale factors + records and barriers <= 232448");
    static_assert(sm90::is_aligned(kAt),
                  "stages, pull buffers: what follows them in shared memory is not aligned");
    static_assert(
        Facts::kGateUpColumns == layout::kQuantGroup,
        "block_n: h is quantized by groups of layout::kQuantGroup = block_n / 2 columns, a tile at a time");
    static_assert(sm90::is_power_of_two(Facts::kStages),
                  "stages: the ring of a GEMM of e4m3 counts modulo a power of two");
    static_assert(Facts::kStages <= layout::kScaleBlocks * (layout::kXScaleBuffers - 1) + 1,
                  "stages: scale factors of x are loaded over those of k-blocks whose stages are released, "
                  "stages <= kScaleBlocks * (kXScaleBuffers - 1) + 1");
};

// The layer of sm90_bf16_moe_forward, launched alike, with both GEMMs in e4m3: x is quantized before it
// travels, h as it is stored, each with a scale factor per 1x128; weights come with one per 128x128.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_forward(
    const __grid_constant__ layout::ForwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    const typename C::Smem shared(raw);
    if (ptx::thread_id() == 0) shared.init_barriers();
    Tracer<C::kTrace> routing(p.trace, TraceRole::kLoad, ptx::thread_id() == 0);
    routing.start();
    if (!prepare_tables<C>(p, shared)) {
        poison_results<C>(p);
        return;
    }
    routing.end(TraceKind::kRoute, 0, 0, 0);
    const auto warp = static_cast<int>(ptx::thread_id()) / 32;
    const bool first_lane = ptx::thread_id() % 32 == 0;
    const auto cta = static_cast<int>(ptx::cluster_rank());
    const std::uint64_t epoch = *shared.epoch();
    copy_first_rows<C>(p, epoch);
    routing.end(TraceKind::kFirstRows, 0, 0, 0);
    if (warp < sm90::kFirstMathWarp) {
        ptx::shrink_registers<C::kCommRegisters>();
        if (warp == sm90::kLoadWarp) {
            if (first_lane) sm90::load_tiles<C>(p, shared, cta, routing);
        } else if (warp == sm90::kScheduleWarp) {
            schedule_tiles<C>(p, shared, epoch, cta);
        } else {
            // The pulling and the pushing warp: combine takes whoever has nothing else to do.
            Tracer<C::kTrace> tracer(p.trace, warp == sm90::kPullWarp ? TraceRole::kPull : TraceRole::kPush,
                                     first_lane);
            if (warp == sm90::kPullWarp) pull_rows<C>(p, shared, epoch, tracer);
            if (warp == sm90::kPushWarp && ptx::cta_id() == 0) announce_empty_chunks<C>(p, epoch);
            Combiner<C>(p, epoch).run(tracer);
            if (warp == sm90::kPushWarp && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(
            p.trace,
            warp < sm90::kFirstMathWarp + layout::kStoringWarps ? TraceRole::kMath0 : TraceRole::kMath1,
            ptx::thread_id() % sm90::kWarpgroupThreads == 0);
        sm90::multiply_tiles_fp8<C>(p, shared, tracer);
        Combiner<C>(p, epoch).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

}  // namespace mega_moe::device
