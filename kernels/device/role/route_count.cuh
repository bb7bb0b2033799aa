#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/role/route_ids.cuh"
#include "device/role/route_publish.cuh"
#include "layout/route_shared.h"

namespace mega_moe::device {

// The shared memory of the routing phase, as pointers.
struct RouteMemory {
    layout::RouteState& state;
    std::uint32_t* counts;
    std::uint32_t* rows;
    std::uint32_t* cta_rows;
    std::uint32_t* before;
};

// Tokens of all ranks that this CTA takes, in tiles.
struct CtaRange {
    int tile_tokens;
    int range_tokens;
    int first;  // token
    int end;
};

// The token and source rank of this thread in a tile.
struct Place {
    int token;
    int rank;
    bool live;  // there is such a token
};

__device__ __forceinline__ Place place_in_tile(const RouteParams& p, const layout::RouteState& state,
                                               int tile_tokens, int first, int end) {
    const int num_ranks = p.endpoint.num_ranks;
    const int thread = static_cast<int>(threadIdx.x);
    const int token = first + thread / num_ranks;
    const int rank = thread % num_ranks;
    const bool in_tile = thread < tile_tokens * num_ranks && token < end;
    return {token, rank, in_tile && token < state.tokens[rank]};
}

// Ids of this thread's token; a single rank reads the caller's and, if told so, reports bad ones.
__device__ __forceinline__ TokenIds tile_ids(const RouteParams& p, const layout::RouteState& state,
                                             const Place& at, bool report) {
    if (!at.live) return masked_ids();
    if (p.endpoint.num_ranks > 1)
        return published_ids(published_row(p, at.rank, at.token, state.epoch), p.top_k);
    int bad_slot;
    const TokenIds ids = raw_ids(p, at.token, bad_slot);
    if (report && bad_slot >= 0) report_bad_id(p, state.epoch, at.token, bad_slot);
    return ids;
}

// Which of a token's experts this rank holds.
struct LocalIds {
    std::uint32_t first_expert;  // of this rank
    std::uint32_t num_local;

    // Local number of a global id; not below num_local when another rank or none holds it.
    __device__ __forceinline__ std::uint32_t operator()(std::uint32_t id) const { return id - first_expert; }
    __device__ __forceinline__ bool holds(std::uint32_t local) const { return local < num_local; }
};

__device__ __forceinline__ LocalIds local_ids(const RouteParams& p) {
    return {static_cast<std::uint32_t>(p.endpoint.rank * p.num_local),
            static_cast<std::uint32_t>(p.num_local)};
}

__device__ __forceinline__ bool has_local(const RouteParams& p, const TokenIds& ids) {
    const LocalIds local = local_ids(p);
    bool any = false;
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot >= p.top_k) break;
        any |= local.holds(local(ids[slot]));
    }
    return any;
}

// Adds one token to the CTA's counts. Sums of integers, so the order of the atomic additions does not matter.
__device__ __forceinline__ void count_token(const RouteParams& p, std::uint32_t* counts,
                                            const TokenIds& ids) {
    const LocalIds local = local_ids(p);
    std::uint32_t rows = 0;
    std::uint32_t first = local.num_local;
    std::uint32_t last = 0;
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot >= p.top_k) break;
        const std::uint32_t expert = local(ids[slot]);
        if (!local.holds(expert)) continue;
        atomicAdd(counts + expert, 1u);
        first = min(first, expert);
        last = max(last, expert);
        ++rows;
    }
    if (rows > 0) {
        atomicAdd(counts + layout::column_of_first(p.num_local) + first, 1u);
        atomicAdd(counts + layout::column_of_last(p.num_local) + last, 1u);
    }
    const std::uint32_t warp_rows = ptx::sum(rows);
    const std::uint32_t residents = ptx::ballot(rows > 0);
    if (ptx::lane_id() != 0 || warp_rows == 0) return;
    atomicAdd(counts + layout::column_of_rows(p.num_local), warp_rows);
    atomicAdd(counts + layout::column_of_residents(p.num_local),
              static_cast<std::uint32_t>(__popc(residents)));
}

// All threads: counts the CTA's tokens, and notes what came before each block that starts in its range. `ids`
// ends as those of the last tile, so that a CTA with one tile need not load them again.
template <int Threads>
__device__ __forceinline__ void count_range(const RouteParams& p, RouteMemory& m, const CtaRange& r,
                                            TokenIds& ids) {
    const int columns = layout::num_columns(p.num_local);
    // One step ahead: the ids of a tile are on their way while the tile before it is counted.
    TokenIds current = masked_ids();
#pragma unroll 1
    for (int first = r.first - r.tile_tokens; first < r.end; first += r.tile_tokens) {
        const int next_first = first + r.tile_tokens;
        TokenIds next = masked_ids();
        if (next_first < r.end)
            next = tile_ids(p, m.state, place_in_tile(p, m.state, r.tile_tokens, next_first, r.end), true);
        if (first >= r.first) {
            if (!p.one_chunk && first % layout::kBlockTokens == 0) {
                __syncthreads();
                std::uint32_t* row = p.block_counts + std::int64_t{first / layout::kBlockTokens} * columns;
#pragma unroll 1
                for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads)
                    row[i] = m.counts[i];
                __syncthreads();
            }
            count_token(p, m.counts, current);
            ids = current;
        }
        current = next;
    }
    __syncthreads();
    const std::int64_t bank = static_cast<std::int64_t>(m.state.epoch % 2) * layout::kMaxGroups;
    std::uint32_t* group = p.group_counts + (bank + blockIdx.x / layout::kCtasPerGroup) * columns;
    std::uint32_t* own = p.cta_counts + std::int64_t{blockIdx.x} * columns;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads) {
        const std::uint32_t count = m.counts[i];
        own[i] = count;
        if (count > 0) ptx::add_relaxed_gpu(group + i, count);
    }
}

}  // namespace mega_moe::device
