#pragma once
#include <cstdint>

#include "device/comm/fault.cuh"
#include "device/comm/wait.cuh"
#include "layout/workspace.h"

namespace mega_moe::device {

__device__ __forceinline__ std::uint64_t* barrier_word(const layout::Endpoint& e, std::uint64_t epoch) {
    return e.sync + layout::kBarrierWord + epoch % 2 * layout::kBarrierStride;
}

__device__ __forceinline__ bool meet_at(const layout::Endpoint& e, std::uint64_t epoch, std::uint64_t* word) {
    ptx::add_release_gpu(word, 1);
    std::uint64_t seen;
    const auto load = [&] { return ptx::load_acquire_gpu(word); };
    if (wait_for(e, load, gridDim.x, e.progress_ns, seen)) return true;
    give_up(e, epoch, {Role::kGridBarrier, Kind::kProgress, blockIdx.x, seen, gridDim.x});
    return false;
}

// The barrier of this rank's CTAs, one per launch. Called by one thread once the CTA's threads have met; what
// they wrote before is visible to whoever leaves. The word of the next launch is zeroed here, since none
// polls it now.
__device__ __forceinline__ bool grid_barrier(const layout::Endpoint& e, std::uint64_t epoch) {
    if (blockIdx.x == 0) *barrier_word(e, epoch + 1) = 0;
    return meet_at(e, epoch, barrier_word(e, epoch));
}

// A second barrier, for launches that read the tables. Its word is zeroed by one thread before grid_barrier,
// which all CTAs pass before any adds to it.
__device__ __forceinline__ void open_tables_barrier(const layout::Endpoint& e) {
    e.sync[layout::kTablesBarrierWord] = 0;
}
__device__ __forceinline__ bool tables_barrier(const layout::Endpoint& e, std::uint64_t epoch) {
    return meet_at(e, epoch, e.sync + layout::kTablesBarrierWord);
}

}  // namespace mega_moe::device
