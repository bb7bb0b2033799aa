#pragma once
#include "device/comm/grid_barrier.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/role/forward_load.cuh"
#include "device/role/forward_math.cuh"
#include "device/role/forward_pull.cuh"
#include "device/role/forward_push.cuh"
#include "device/role/forward_schedule.cuh"
#include "device/role/forward_shared.cuh"
#include "device/role/forward_stage.cuh"
#include "device/role/route.cuh"

namespace mega_moe::device {

// All threads: routes, and returns whether both CTAs of the cluster have the tables of all CTAs.
template <class C>
__device__ __forceinline__ bool prepare_tables(const ForwardParams& p, const ForwardShared<C>& shared) {
    const Endpoint& e = p.route.endpoint;
    const auto thread = static_cast<std::int64_t>(ptx::thread_id());
    const std::int64_t first = std::int64_t{ptx::cta_id()} * C::kThreads + thread;
    for (std::int64_t i = first; i < p.num_counters; i += std::int64_t{ptx::num_ctas()} * C::kThreads)
        p.counters[i] = 0;
    if (first == 0) open_tables_barrier(e);
    // Stable until the grid barrier, which every CTA must reach first. Kept where the roles find it, since
    // routing needs all registers.
    if (thread == 0) *shared.epoch() = ptx::load_relaxed_sys(e.control + layout::kEpochWord) + 1;
    const auto stage = [&](std::uint64_t launch) { stage_x<C::kThreads>(p, launch); };
    bool ready = route<C::kThreads>(p.route, shared.generic, stage);
    __syncthreads();
    if (thread == 0) {
        if (ready) ready = tables_barrier(e, *shared.epoch());
        // A CTA must not send into the memory of one that has left.
        for (std::uint32_t cta = 0; cta < C::kClusterSize; ++cta)
            ptx::store_shared_at(shared.state_address(static_cast<int>(ptx::cluster_rank())), cta, ready);
    }
    ptx::cluster_sync();
    return shared.state()[0] != 0 && shared.state()[1] != 0;
}

// All threads: y becomes NaN, since the call gave no result. All of it by every CTA that knows: others may
// have left before the fault, and whoever still writes sums does this after them.
template <class C>
__device__ __forceinline__ void poison_y(const ForwardParams& p) {
    const std::int64_t vectors = std::int64_t{p.route.num_tokens} * p.hidden / 8;
    for (std::int64_t i = ptx::thread_id(); i < vectors; i += C::kThreads)
        ptx::store(p.y + i * 16, {kTwoNans, kTwoNans, kTwoNans, kTwoNans});
}

// The whole layer in one launch: routing, dispatch, gate/up projection, SwiGLU, down projection, combine. Its
// CTAs wait for one another and for those of other ranks, so all must be resident: launched cooperatively,
// one to an SM, in clusters of two.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_bf16_moe_forward(
    const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    const ForwardShared<C> shared(raw);
    if (ptx::thread_id() == 0) shared.init_barriers();
    Tracer<C::kTrace> routing(p.trace, TraceRole::kLoad, ptx::thread_id() == 0);
    routing.start();
    if (!prepare_tables<C>(p, shared)) {
        poison_y<C>(p);
        return;
    }
    routing.end(TraceKind::kRoute, 0, 0, 0);
    const auto warp = static_cast<int>(ptx::thread_id()) / 32;
    const bool first_lane = ptx::thread_id() % 32 == 0;
    const auto cta = static_cast<int>(ptx::cluster_rank());
    const std::uint64_t epoch = *shared.epoch();
    copy_first_rows<C>(p, epoch);
    if (warp < 4) {
        ptx::shrink_registers<C::kCommRegisters>();
        if (warp == 0) {
            if (first_lane) load_tiles<C>(p, shared, cta, routing);
        } else if (warp == 1) {
            schedule_tiles<C>(p, shared, epoch, cta);
        } else {
            Tracer<C::kTrace> tracer(p.trace, warp == 2 ? TraceRole::kPull : TraceRole::kPush, first_lane);
            if (warp == 2) pull_rows<C>(p, shared, epoch, tracer);
            if (warp == 3 && ptx::cta_id() == 0) announce_empty_chunks<C>(p, epoch);
            Combiner<C, false>(p, epoch).run(tracer);
            if (warp == 3 && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(p.trace, warp < 8 ? TraceRole::kMath0 : TraceRole::kMath1,
                                 ptx::thread_id() % 128 == 0);
        multiply_tiles<C>(p, shared, tracer);
        Combiner<C, true>(p, epoch).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_y<C>(p);
}

}  // namespace mega_moe::device
