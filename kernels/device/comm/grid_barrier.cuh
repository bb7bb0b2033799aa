#pragma once
#include <cstdint>

#include "device/comm/fault.cuh"
#include "device/comm/wait.cuh"
#include "layout/workspace.h"

namespace mega_moe::device {

__device__ __forceinline__ std::uint64_t* barrier_word(const Endpoint& e, std::uint64_t epoch) {
    return e.sync + layout::kBarrierWord + epoch % 2 * layout::kBarrierStride;
}

// The barrier of this rank's CTAs, one per launch. Called by one thread once the CTA's threads have met; what
// they wrote before is visible to whoever leaves. The word of the next launch is zeroed here, since none
// polls it now.
__device__ __forceinline__ bool grid_barrier(const Endpoint& e, std::uint64_t epoch) {
    std::uint64_t* word = barrier_word(e, epoch);
    if (blockIdx.x == 0) *barrier_word(e, epoch + 1) = 0;
    ptx::add_release_gpu(word, 1);
    std::uint64_t seen;
    const auto load = [&] { return ptx::load_acquire_gpu(word); };
    if (wait_for(e, load, gridDim.x, e.progress_ns, seen)) return true;
    give_up(e, epoch, {Role::kGridBarrier, Kind::kProgress, blockIdx.x, seen, gridDim.x});
    return false;
}

}  // namespace mega_moe::device
