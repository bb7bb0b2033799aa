#pragma once
#include <cstddef>
#include <cstdint>

#include "device/combine/combine.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/poison.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/forward.cuh"
#include "device/sm90/forward_load.cuh"
#include "device/sm90/kernel_budget.cuh"
#include "layout/forward_params.h"

namespace mega_moe::device {

// The whole layer in one launch: routing, dispatch, gate/up GEMM, activation, down GEMM, combine. Its CTAs
// wait for one another and for those of other ranks, so all must be resident: launched cooperatively, one to
// an SM, in clusters of two.
template <class C>
__device__ __forceinline__ void sm90_moe_forward(const layout::ForwardParams& p, std::byte* raw) {
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
        C::multiply(p, shared, tracer);
        Combiner<C>(p, epoch).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

}  // namespace mega_moe::device
