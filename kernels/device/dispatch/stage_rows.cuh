#pragma once
#include <cstdint>

#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/special_registers.cuh"
#include "device/quantize/groups.cuh"
#include "layout/layer_params.h"
#include "layout/scale_rounding.h"

namespace mega_moe::device {

// All threads: `bytes` from one place to another, unless they lie there already.
template <int Threads>
__device__ __forceinline__ void copy_block(const std::byte* from, std::byte* to, std::int64_t bytes) {
    if (from == to) return;
    constexpr int kVectors = 8;  // in flight per thread
    const auto vectors = static_cast<int>(bytes / 16);
    for (int i = static_cast<int>(ptx::thread_id()); i < vectors; i += kVectors * Threads) {
        uint4 v[kVectors];
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
            if (i + j * Threads < vectors) v[j] = ptx::load_stream(from + std::int64_t{i + j * Threads} * 16);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
            if (i + j * Threads < vectors) ptx::store(to + std::int64_t{i + j * Threads} * 16, v[j]);
    }
}

// All threads: this CTA's share of some rows. What is quantized next is on its way meanwhile.
template <int Threads>
__device__ __forceinline__ void quantize_share(const QuantizedRows& rows, std::uint32_t share,
                                               std::uint32_t shares) {
    constexpr std::uint32_t kTile = Threads / 32 * kGroupsPerWarp;
    const std::uint32_t step = shares * kTile;
    std::uint32_t group = share * kTile + ptx::thread_id() / 32 * kGroupsPerWarp;
    uint4 v[kQuad];
    load_groups(rows, group, v);
#pragma unroll 1
    for (; group < rows.num_groups; group += step) {
        uint4 next[kQuad];
        load_groups(rows, group + step, next);
        quantize_groups(rows, group, v);
#pragma unroll
        for (int i = 0; i < kQuad; ++i)
            v[i] = next[i];
    }
}

// The groups of an own run of tokens, and where their codes and scale factors are staged.
__device__ __forceinline__ QuantizedRows staged_groups(const layout::LayerParams& p, std::int64_t first,
                                                       int tokens) {
    const layout::Endpoint& e = p.route.endpoint;
    const std::int64_t groups = p.hidden / layout::kQuantGroup;
    return {p.moved[0].from + first * p.hidden * 2,
            e.at<std::byte>(e.rank, p.moved[0].staged) + first * p.hidden,
            e.at<float>(e.rank, p.moved_scales.staged) + first * groups,
            static_cast<std::uint32_t>(tokens * groups), p.rounding};
}

// All threads: this CTA's blocks of what travels into the symmetric buffer, where the other ranks find them,
// and a flag to every rank for each. Nothing to copy when the caller's rows lie there already. A quantized
// layer's rows come by way of the buffer with one rank too, and where there is no place that they come from,
// their codes and scale factors lie in it already.
template <class C>
__device__ __forceinline__ void stage_rows(const layout::LayerParams& p, std::uint64_t epoch) {
    const layout::Endpoint& e = p.route.endpoint;
    if (e.num_ranks == 1) {
        if constexpr (C::kDispatchesFp8) {
            if (p.moved[0].from != nullptr)
                quantize_share<C::kThreads>(staged_groups(p, 0, p.route.num_tokens), ptx::cta_id(),
                                            ptx::num_ctas());
            ptx::fence_proxy_async_global();
        }
        if constexpr (C::kQuantizesOnArrival)
            for (int i = 0; i < 2; ++i)
                quantize_share<C::kThreads>(
                    {p.moved[i].from, p.own[i].codes, p.own[i].scales,
                     static_cast<std::uint32_t>(p.route.num_tokens * (p.hidden / layout::kQuantGroup)),
                     p.rounding},
                    ptx::cta_id(), ptx::num_ctas());
        return;
    }
    const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
    const auto blocks = static_cast<int>(layout::num_blocks(p.route.num_tokens));
    for (int block = static_cast<int>(ptx::cta_id()); block < blocks;
         block += static_cast<int>(ptx::num_ctas())) {
        const int first = block * layout::kBlockTokens;
        const int tokens = min(layout::kBlockTokens, p.route.num_tokens - first);
        if constexpr (C::kDispatchesFp8) {
            if (p.moved[0].from != nullptr)
                quantize_share<C::kThreads>(staged_groups(p, first, tokens), 0, 1);
        } else {
#pragma unroll
            for (int i = 0; i < C::kMoved; ++i)
                copy_block<C::kThreads>(p.moved[i].from + first * row_bytes,
                                        e.at<std::byte>(e.rank, p.moved[i].staged) + first * row_bytes,
                                        tokens * row_bytes);
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
