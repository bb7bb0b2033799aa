#pragma once
#include <cstdint>

#include "device/comm/fault.cuh"
#include "device/comm/wait.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/route/ids.cuh"
#include "layout/route_shared.h"

// What ranks exchange at the start of a launch: a header with their number of tokens, then the ids by
// blocks.
namespace mega_moe::device {

using layout::RouteState;

__device__ __forceinline__ void report_bad_id(const layout::RouteParams& p, std::uint64_t epoch,
                                              std::int64_t token, int slot) {
    const std::int64_t pair = token * p.top_k + slot;
    ptx::max_relaxed_gpu(p.endpoint.sync + layout::kBadIdEpochWord, epoch);
    write_record(p.endpoint, epoch,
                 {Role::kPublish, Kind::kBadId, static_cast<std::uint64_t>(pair),
                  static_cast<std::uint64_t>(raw_id(p, pair)), static_cast<std::uint64_t>(p.num_experts)});
}

// Threads 0 to num_ranks - 1 of one CTA. Carries no data but the word itself, so it needs no order.
__device__ __forceinline__ void send_header(const layout::RouteParams& p, std::uint64_t epoch) {
    const layout::Endpoint& e = p.endpoint;
    if (threadIdx.x >= static_cast<unsigned>(e.num_ranks)) return;
    const std::uint64_t header =
        layout::encode_header(epoch, p.call, p.refuse, static_cast<std::uint64_t>(p.num_tokens));
    ptx::store_relaxed_sys(
        e.at<std::uint64_t>(threadIdx.x, p.headers) + epoch % 2 * static_cast<unsigned>(e.num_ranks) + e.rank,
        header);
}

__device__ __forceinline__ void store_weights(std::uint32_t* row, const TokenWeights& w, int top_k) {
    if (top_k % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 4; ++i)
            if (i * 4 < top_k)
                reinterpret_cast<uint4*>(row)[i] = {w.bits[4 * i], w.bits[4 * i + 1], w.bits[4 * i + 2],
                                                    w.bits[4 * i + 3]};
    } else {
#pragma unroll
        for (int slot = 0; slot < kMaxTopK; ++slot)
            if (slot < top_k) row[slot] = w.bits[slot];
    }
}

// This CTA's share of the blocks: ids and weights into the own buffer, then a flag to every rank for each
// block.
template <int Threads>
__device__ __forceinline__ void publish_blocks(const layout::RouteParams& p, std::uint64_t epoch) {
    const layout::Endpoint& e = p.endpoint;
    const auto blocks = static_cast<int>(layout::num_blocks(p.num_tokens));
    const int share = layout::ceil_div(blocks, static_cast<int>(gridDim.x));
    const int first = min(static_cast<int>(blockIdx.x) * share, blocks);
    const int end = min(first + share, blocks);
    const int end_token = min(end * layout::kBlockTokens, p.num_tokens);
#pragma unroll 1
    for (int token = first * layout::kBlockTokens + static_cast<int>(threadIdx.x); token < end_token;
         token += Threads) {
        // All loads before all stores, which the compiler would not change places with.
        TokenWeights weights{};
        if (p.weighted) weights = raw_weights(p, token);
        int bad_slot;
        const TokenIds ids = raw_ids(p, token, bad_slot);
        store_ids(const_cast<std::uint16_t*>(published_row(p, e.rank, token, epoch)), ids, p.top_k);
        if (p.weighted) store_weights(published_weights(p, e.rank, token, epoch), weights, p.top_k);
        if (bad_slot >= 0) report_bad_id(p, epoch, token, bad_slot);
    }
    __syncthreads();
    // Covers what the other threads of the CTA wrote before they met this one.
    if (static_cast<int>(threadIdx.x) < (end - first) * e.num_ranks) ptx::fence_sys();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < (end - first) * e.num_ranks; i += Threads) {
        const std::int64_t block = first + i / e.num_ranks;
        std::uint64_t* flags = e.at<std::uint64_t>(i % e.num_ranks, p.block_flags);
        ptx::store_relaxed_sys(flags + std::int64_t{e.rank} * p.max_blocks + block, epoch);
    }
}

// Warp 0. The one wait whose limit is that of arrival: until all headers are here, some rank may not have
// launched.
__device__ __forceinline__ void await_headers(const layout::RouteParams& p, RouteState& state) {
    const layout::Endpoint& e = p.endpoint;
    const auto peer = static_cast<int>(ptx::lane_id());
    const std::uint64_t epoch = state.epoch;
    bool met = true;
    std::uint64_t header = 0;
    if (peer < e.num_ranks) {
        const std::uint64_t* words = e.at<std::uint64_t>(e.rank, p.headers) + peer;
        const auto bank = static_cast<unsigned>(e.num_ranks);
        const auto load = [&] { return ptx::load_acquire_sys(words + epoch % 2 * bank); };
        met = wait_for(e, load, epoch << layout::kHeaderEpochShift, e.arrival_ns, header);
        if (!met) {
            // Its last launch may have been the one before, whose header is in the other bank.
            const std::uint64_t before = ptx::load_relaxed_sys(words + (epoch + 1) % 2 * bank);
            give_up(e, epoch,
                    {Role::kHeader, Kind::kArrival, static_cast<std::uint64_t>(peer),
                     (header > before ? header : before) >> layout::kHeaderEpochShift, epoch});
        }
    }
    const bool refused = met && (header & layout::kHeaderRefused) != 0;
    const auto tokens = static_cast<std::uint32_t>(header & layout::kHeaderTokens);
    if (refused && peer != e.rank)
        write_record(e, epoch,
                     {Role::kHeader, Kind::kRefused, static_cast<std::uint64_t>(peer), tokens,
                      static_cast<std::uint64_t>(p.max_tokens)});
    // Ranks that make different calls would misread what the others send.
    const auto call =
        static_cast<std::uint32_t>(header >> layout::kHeaderCallShift & layout::kHeaderCallMask);
    const bool differs = peer < e.num_ranks && met && !refused && !p.refuse && call != p.call;
    if (differs)
        give_up(e, epoch, {Role::kHeader, Kind::kMismatch, static_cast<std::uint64_t>(peer), call, p.call});
    const bool lost = ptx::any(!met || differs);
    const std::uint32_t refusals = ptx::ballot(refused);
    const std::uint32_t most = ptx::largest(refused ? 0 : tokens);
    if (peer < e.num_ranks) state.tokens[peer] = static_cast<std::int32_t>(tokens);
    if (peer != 0) return;
    state.lost = lost;
    state.refused = __ffs(static_cast<int>(refusals));
    state.most_tokens = static_cast<std::int32_t>(most);
}

// All threads: the ids of tokens [first, end) of all ranks. A thread that gives up says so in the state.
template <int Threads>
__device__ __forceinline__ void await_ids(const layout::RouteParams& p, RouteState& state, int first,
                                          int end) {
    const layout::Endpoint& e = p.endpoint;
    const int first_block = first / layout::kBlockTokens;
    const auto blocks = static_cast<int>(layout::num_blocks(end)) - first_block;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < blocks * e.num_ranks; i += Threads) {
        const int peer = i % e.num_ranks;
        const int block = first_block + i / e.num_ranks;
        if (block * layout::kBlockTokens >= state.tokens[peer]) continue;
        const std::int64_t index = std::int64_t{peer} * p.max_blocks + block;
        const std::uint64_t* word = e.at<std::uint64_t>(e.rank, p.block_flags) + index;
        std::uint64_t seen;
        const auto load = [&] { return ptx::load_acquire_sys(word); };
        if (wait_for(e, load, state.epoch, e.progress_ns, seen)) continue;
        give_up(e, state.epoch,
                {Role::kBlockFlag, Kind::kProgress, static_cast<std::uint64_t>(index), seen, state.epoch});
        state.stuck = 1;
    }
}

}  // namespace mega_moe::device
