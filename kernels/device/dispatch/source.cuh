#pragma once
#include <cstdint>

#include "device/comm/wait.cuh"
#include "device/ptx/fence.cuh"
#include "device/route/tables.cuh"

// What the warps that dispatch rows wait for, and where they read.
namespace mega_moe::device {

// Where a token's row is read: with EP=1 it is copied to the symmetric buffer only where it is quantized.
template <class C>
__device__ __forceinline__ const std::byte* row_source(const layout::LayerParams& p,
                                                       const layout::MovedRows& m, const TokenRows& t,
                                                       int row_bytes) {
    const layout::Endpoint& e = p.route.endpoint;
    const std::byte* from =
        C::kDispatchesFp8 || e.num_ranks > 1 ? e.at<const std::byte>(t.rank, m.staged) : m.from;
    return from + std::int64_t{t.token} * row_bytes;
}

// One warp: until all ranks have staged all of their x, which they do before they route. After a fault
// nothing is there any more.
template <class C>
__device__ __forceinline__ void await_staged_x(const layout::LayerParams& p, std::uint64_t epoch,
                                               bool& lost) {
    const layout::RouteParams& r = p.route;
    const layout::Endpoint& e = r.endpoint;
    if (e.num_ranks == 1) {
        // All CTAs have passed a barrier since.
        if constexpr (C::kDispatchesFp8) ptx::fence_proxy_async_global();
        return;
    }
    for (int rank = 0; rank < e.num_ranks; ++rank) {
        const auto tokens = table_word(r.summary, layout::kSummaryWords + rank);
        const auto blocks = static_cast<int>(layout::num_blocks(tokens));
        for (int block = static_cast<int>(ptx::lane_id()); block < blocks; block += 32) {
            const std::int64_t index = std::int64_t{rank} * r.max_blocks + block;
            const std::uint64_t* flag = e.at<std::uint64_t>(e.rank, p.x_flags) + index;
            std::uint64_t seen;
            if (lost || wait_for(e, [&] { return ptx::load_acquire_sys(flag); }, epoch, e.progress_ns, seen))
                continue;
            give_up(e, epoch,
                    {Role::kPullSource, Kind::kProgress, static_cast<std::uint64_t>(index), seen, epoch});
            lost = true;
        }
        lost = ptx::any(lost);
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
}

// One warp: waits until the part of the pools for a chunk is free again.
__device__ __forceinline__ void await_free_chunk(const layout::LayerParams& p, std::uint64_t epoch, int chunk,
                                                 bool& lost) {
    if (chunk < 2) return;
    const layout::Endpoint& e = p.route.endpoint;
    const std::uint32_t* sent = p.counters + p.sent + chunk - 2;
    const auto wanted = static_cast<std::uint64_t>(view_chunk(p, chunk - 2).residents);
    if (ptx::lane_id() == 0 && !lost) {
        std::uint64_t seen;
        const auto load = [&] { return static_cast<std::uint64_t>(ptx::load_acquire_gpu(sent)); };
        if (!wait_for(e, load, wanted, e.progress_ns, seen)) {
            give_up(e, epoch,
                    {Role::kChunkFree, Kind::kProgress, static_cast<std::uint64_t>(chunk), seen, wanted});
            lost = true;
        }
    }
    lost = ptx::any(lost);
}

}  // namespace mega_moe::device
