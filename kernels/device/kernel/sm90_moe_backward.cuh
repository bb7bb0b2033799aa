#pragma once
#include <cstddef>
#include <cstdint>

#include "device/combine/combine.cuh"
#include "device/combine/dtopk.cuh"
#include "device/dispatch/prepare_chunk.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/poison.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/backward.cuh"
#include "device/sm90/backward_load.cuh"
#include "device/sm90/kernel_budget.cuh"
#include "layout/backward_params.h"
#include "layout/gradients.h"

namespace mega_moe::device {

// The backward of the whole layer in one launch: routing, dispatch of x and dy, recompute of gate and up, dz,
// dx and its combine, wgrad, and the gradients of the routing weights. Launched as the forward is.
template <class C>
__device__ __forceinline__ void sm90_moe_backward(const layout::BackwardParams& p, std::byte* raw) {
    static_assert(sm90::KernelBudget<C>::kFits);
    const typename C::Smem shared(raw);
    if (ptx::thread_id() == 0) shared.init_barriers();
    Tracer<C::kTrace> routing(p.trace, TraceRole::kLoad, ptx::thread_id() == 0);
    routing.start();
    if (!prepare_tables<C>(p, shared)) {
        poison_results<C>(p);
        return;
    }
    routing.end(TraceKind::kRoute, 0, 0, 0);
    // The roles below count on it.
    static_assert(
        C::kBlockN == layout::kGradientColumns && 2 * C::kBlockM == layout::kGradientRows,
        "block_m, block_n: a cluster's tile of wgrad is layout::kGradientRows x layout::kGradientColumns");
    static_assert(C::kGateUpColumns == layout::kDtopkColumns,
                  "block_n: a part of dtopk is of layout::kDtopkColumns = block_n / 2 columns");
    const auto warp = static_cast<int>(ptx::thread_id()) / 32;
    const bool first_lane = ptx::thread_id() % 32 == 0;
    const auto cta = static_cast<int>(ptx::cluster_rank());
    const std::uint64_t epoch = *shared.epoch();
    copy_first_rows<C>(p, epoch);
    zero_padding<C>(p, 0, warp * static_cast<int>(ptx::num_ctas()) + static_cast<int>(ptx::cta_id()),
                    C::kThreads / 32 * static_cast<int>(ptx::num_ctas()));
    // One warp takes the rows further that all have brought.
    if constexpr (C::kFp8) __syncthreads();
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
            } else if constexpr (C::kFp8) {
                if (has_own_codes(p)) {
                    tracer.start();
                    copy_runs<C>(p, 0, 1, tracer);
                }
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
        C::multiply(p, shared, tracer);
        Combiner<C, DtopkPiggyback>(p, epoch, {p}).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

}  // namespace mega_moe::device
