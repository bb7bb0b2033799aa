#pragma once
#include <cstdint>

#include "device/comm/grid_barrier.cuh"
#include "device/dispatch/stage_rows.cuh"
#include "device/ptx/cluster.cuh"
#include "device/route/route.cuh"

// How every launch of the layer begins.
namespace mega_moe::device {

// All threads: routes, and returns whether both CTAs of the cluster have the tables of all CTAs.
template <class C>
__device__ __forceinline__ bool prepare_tables(const layout::LayerParams& p, const typename C::Smem& shared) {
    const layout::Endpoint& e = p.route.endpoint;
    const auto thread = static_cast<std::int64_t>(ptx::thread_id());
    const std::int64_t first = std::int64_t{ptx::cta_id()} * C::kThreads + thread;
    for (std::int64_t i = first; i < p.num_counters; i += std::int64_t{ptx::num_ctas()} * C::kThreads)
        p.counters[i] = 0;
    if (first == 0) open_tables_barrier(e);
    // Stable until the grid barrier, which every CTA must reach first. Kept where the roles find it, since
    // routing needs all registers.
    if (thread == 0) *shared.epoch() = ptx::load_relaxed_sys(e.control + layout::kEpochWord) + 1;
    const auto stage = [&](std::uint64_t launch) { stage_rows<C>(p, launch); };
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

}  // namespace mega_moe::device
