#pragma once
#include <cstddef>
#include <cstdint>

#include "device/combine/combine.cuh"
#include "device/combine/dtopk.cuh"
#include "device/common/layer_facts.cuh"
#include "device/dispatch/prepare_chunk.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/poison.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/backward.cuh"
#include "device/sm90/backward_load.cuh"
#include "device/sm90/backward_math_fp8.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/smem.cuh"
#include "layout/backward_params.h"
#include "layout/gradients.h"
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

    static_assert(
        sm90::kWarpgroupThreads * kCommRegisters + Facts::kMathThreads * kMathRegisters <=
            Facts::kThreads * Facts::kLaunchRegisters,
        "registers: 128 * kCommRegisters + (threads - 128) * kMathRegisters <= threads * kLaunchRegisters");
    static_assert(Facts::kStages * Facts::kStageBytes + Facts::kMathWarps * sm90::kStoreBytes +
                          kPullBuffers * kPullBytes + (kAt.ring - kAt.x_scales) + (kAt.total - kAt.ring) <=
                      sm90::kSharedBytesOfBlock,
                  "shared memory: stages * 128 * (block_m + block_n) + math warps * 2048 + pull buffers * "
                  "4096 + scale factors + records and barriers <= 232448");
    static_assert(sm90::is_aligned(kAt),
                  "stages, pull buffers: what follows them in shared memory is not aligned");
    static_assert(
        Facts::kBlockN == layout::kGradientColumns && 2 * Facts::kBlockM == layout::kGradientRows,
        "block_m, block_n: a cluster's tile of wgrad is layout::kGradientRows x layout::kGradientColumns");
    static_assert(Facts::kGateUpColumns == layout::kDtopkColumns,
                  "block_n: a part of dtopk is of layout::kDtopkColumns = block_n / 2 columns");
    static_assert(sm90::is_power_of_two(Facts::kStages),
                  "stages: the ring of a GEMM of e4m3 counts modulo a power of two");
};

// As sm90_bf16_moe_backward, launched alike, with recompute, dz and dx in e4m3: x and dy travel in bf16 and
// are quantized as they arrive, dz as it is stored, each with a scale factor per 1x128. wgrad reads bf16, or
// e4m3 with a scale factor per 128 rows.
// Inlined in two steps, since the compiler simplifies a function before what calls it: written into the
// kernel itself, the same roles compile to other code.
template <class C>
__device__ __forceinline__ void fp8_moe_backward(const layout::BackwardParams& p, std::byte* raw) {
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
    zero_padding<C>(p, 0, warp * static_cast<int>(ptx::num_ctas()) + static_cast<int>(ptx::cta_id()),
                    C::kThreads / 32 * static_cast<int>(ptx::num_ctas()));
    // One warp takes the rows further that all have brought.
    __syncthreads();
    routing.end(TraceKind::kFirstRows, 0, 0, 0);
    if (warp < sm90::kFirstMathWarp) {
        ptx::shrink_registers<C::kCommRegisters>();
        if (warp == sm90::kLoadWarp) {
            if (first_lane) sm90::BackwardLoader<C>(p, shared, cta).run(routing);
        } else if (warp == sm90::kScheduleWarp) {
            BackwardScheduler<C>(p, shared, epoch, cta).run();
        } else {
            // The pulling and the pushing warp: combine takes whoever has nothing else to do.
            Tracer<C::kTrace> tracer(p.trace, warp == sm90::kPullWarp ? TraceRole::kPull : TraceRole::kPush,
                                     first_lane);
            if (warp == sm90::kPushWarp && ptx::cta_id() == 0) announce_empty_chunks<C>(p, epoch);
            if (warp == sm90::kPullWarp) {
                pull_rows<C>(p, shared, epoch, tracer, ChunkPreparation<C>{p, epoch});
            } else if (has_own_codes(p)) {
                tracer.start();
                copy_runs<C>(p, 0, 1, tracer);
            }
            Combiner<C, DtopkPiggyback>(p, epoch, {p}).run(tracer);
            if (warp == sm90::kPushWarp && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(
            p.trace,
            warp < sm90::kFirstMathWarp + layout::kStoringWarps ? TraceRole::kMath0 : TraceRole::kMath1,
            ptx::thread_id() % sm90::kWarpgroupThreads == 0);
        sm90::Fp8BackwardMath<C>(p, shared).run(tracer);
        Combiner<C, DtopkPiggyback>(p, epoch, {p}).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_backward(
    const __grid_constant__ layout::BackwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    fp8_moe_backward<C>(p, raw);
}

}  // namespace mega_moe::device
