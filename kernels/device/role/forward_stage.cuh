#pragma once
#include <cstdint>

#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/role/forward_params.h"

namespace mega_moe::device {

// All threads: this CTA's blocks of x into the symmetric buffer, where the other ranks find them, and a flag
// to every rank for each. Nothing to copy when the caller's x lies there already.
template <int Threads>
__device__ __forceinline__ void stage_x(const ForwardParams& p, std::uint64_t epoch) {
    const Endpoint& e = p.route.endpoint;
    if (e.num_ranks == 1) return;
    std::byte* staged = e.at<std::byte>(e.rank, p.x_staged);
    const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
    const auto blocks = static_cast<int>(layout::num_blocks(p.route.num_tokens));
    for (int block = static_cast<int>(ptx::cta_id()); block < blocks;
         block += static_cast<int>(ptx::num_ctas())) {
        const int first = block * layout::kBlockTokens;
        const int tokens = min(layout::kBlockTokens, p.route.num_tokens - first);
        const std::byte* from = p.x + first * row_bytes;
        std::byte* to = staged + first * row_bytes;
        if (from != to) {
            constexpr int kVectors = 8;  // in flight per thread
            const auto vectors = static_cast<int>(tokens * row_bytes / 16);
            for (int i = static_cast<int>(ptx::thread_id()); i < vectors; i += kVectors * Threads) {
                uint4 v[kVectors];
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
                    if (i + j * Threads < vectors)
                        v[j] = ptx::load_stream(from + std::int64_t{i + j * Threads} * 16);
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
                    if (i + j * Threads < vectors) ptx::store(to + std::int64_t{i + j * Threads} * 16, v[j]);
            }
        }
        ptx::fence_proxy_async_global();
        __syncthreads();
        if (static_cast<int>(ptx::thread_id()) < e.num_ranks) {
            ptx::fence_sys();
            ptx::store_relaxed_sys(e.at<std::uint64_t>(ptx::thread_id(), p.x_flags) +
                                       std::int64_t{e.rank} * p.route.max_blocks + block,
                                   epoch);
        }
    }
}

}  // namespace mega_moe::device
