#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/route/ids.cuh"
#include "device/route/publish.cuh"
#include "layout/route_shared.h"

namespace mega_moe::device {

// The shared memory of the routing phase, as pointers.
struct RouteMemory {
    layout::RouteState& state;
    std::uint32_t* counts;
    std::uint32_t* rows;
    std::uint32_t* masks;
    std::uint32_t* cta_rows;
    std::uint32_t* before;
};

// Tokens of all ranks that this CTA takes.
struct CtaRange {
    int range_tokens;
    int first;  // token
    int end;
};

// Pairs of a token and its source rank, numbered token * num_ranks + rank, that a warp takes in order, a pair
// to a lane. Empty for a warp that takes none.
struct WarpRun {
    int first;
    int end;

    __device__ __forceinline__ bool is_one_step() const { return end - first <= 32; }
};

template <int Threads>
__device__ __forceinline__ WarpRun warp_run(const layout::RouteParams& p, int first_token, int end_token) {
    const int num_ranks = p.endpoint.num_ranks;
    const int warps = layout::route_warps(Threads, num_ranks);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int end = end_token * num_ranks;
    const int length = layout::ceil_div(max(end_token - first_token, 0) * num_ranks, 32 * warps) * 32;
    const int first = warp < warps ? min(first_token * num_ranks + warp * length, end) : end;
    return {first, min(first + length, end)};
}

// The token and source rank of this lane.
struct Place {
    int token;
    int rank;
    bool live;  // there is such a token
};

__device__ __forceinline__ Place place_in_run(const layout::RouteParams& p, const layout::RouteState& state,
                                              const WarpRun& run, int first) {
    const auto num_ranks = static_cast<unsigned>(p.endpoint.num_ranks);
    const auto pair = static_cast<unsigned>(first) + ptx::lane_id();
    const auto token = static_cast<int>(pair / num_ranks);
    const auto rank = static_cast<int>(pair % num_ranks);
    return {token, rank, static_cast<int>(pair) < run.end && token < state.tokens[rank]};
}

// Ids of this lane's token; a single rank reads the caller's and, if `report`, reports bad ones.
__device__ __forceinline__ TokenIds lane_ids(const layout::RouteParams& p, const layout::RouteState& state,
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

__device__ __forceinline__ LocalIds local_ids(const layout::RouteParams& p) {
    return {static_cast<std::uint32_t>(p.endpoint.rank * p.num_local),
            static_cast<std::uint32_t>(p.num_local)};
}

// Slots are worked off by fours, short bodies under predicates instead of branches. Slots after the last of
// top_k are masked.
inline constexpr int kSlotsAtOnce = 4;

__device__ __forceinline__ bool has_local(const layout::RouteParams& p, const TokenIds& ids) {
    const LocalIds local = local_ids(p);
    bool any = false;
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot % kSlotsAtOnce == 0 && slot >= p.top_k) break;
        any |= local.holds(local(ids[slot]));
    }
    return any;
}

// The local experts of a token: how many slots name one, and the lowest and the highest.
struct Resident {
    std::uint32_t rows;
    std::uint32_t first;
    std::uint32_t last;

    __device__ __forceinline__ void add(bool held, std::uint32_t expert) {
        rows += held;
        first = min(first, expert);  // one that is not held is not below num_local, where `first` begins
        last = max(last, held ? expert : 0);
    }
};

// Adds this lane's token to `counts`, its rows and itself to the lane's own sums. Sums of integers, so the
// order of the atomic additions does not matter.
__device__ __forceinline__ void count_token(const layout::RouteParams& p, std::uint32_t* counts,
                                            const TokenIds& ids, std::uint32_t& rows,
                                            std::uint32_t& residents) {
    const LocalIds local = local_ids(p);
    Resident r{0, local.num_local, 0};
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot % kSlotsAtOnce == 0 && slot >= p.top_k) break;
        const std::uint32_t expert = local(ids[slot]);
        const bool held = local.holds(expert);
        if (held) atomicAdd(counts + expert, 1u);
        r.add(held, expert);
    }
    if (r.rows == 0) return;
    atomicAdd(counts + layout::column_of_first(p.num_local) + r.first, 1u);
    atomicAdd(counts + layout::column_of_last(p.num_local) + r.last, 1u);
    rows += r.rows;
    ++residents;
}

// One warp: adds its run to `counts`. `ids` ends as those of the last step, so that a warp with one step need
// not load them again.
__device__ __forceinline__ void count_run(const layout::RouteParams& p, const layout::RouteState& state,
                                          const WarpRun& run, std::uint32_t* counts, bool report,
                                          TokenIds& ids) {
    std::uint32_t rows = 0;
    std::uint32_t residents = 0;
    // Two steps ahead: a step takes less time than its ids take to come.
    TokenIds next = masked_ids();
    TokenIds after = masked_ids();
#pragma unroll 1
    for (int first = run.first - 64; first < run.end; first += 32) {
        ids = next;
        next = after;
        if (first + 64 < run.end) after = lane_ids(p, state, place_in_run(p, state, run, first + 64), report);
        if (first >= run.first) count_token(p, counts, ids, rows, residents);
    }
    rows = ptx::sum(rows);
    residents = ptx::sum(residents);
    if (ptx::lane_id() != 0 || rows == 0) return;
    atomicAdd(counts + layout::column_of_rows(p.num_local), rows);
    atomicAdd(counts + layout::column_of_residents(p.num_local), residents);
}

// A warp's row of m.rows.
__device__ __forceinline__ std::uint32_t* warp_row(const layout::RouteParams& p, RouteMemory& m) {
    return m.rows + static_cast<int>(threadIdx.x) / 32 * layout::num_columns(p.num_local);
}

template <int Threads>
__device__ __forceinline__ void clear_warp_row(const layout::RouteParams& p, RouteMemory& m) {
    const int columns = layout::num_columns(p.num_local);
    if (static_cast<int>(threadIdx.x) >= layout::route_warps(Threads, p.endpoint.num_ranks) * 32) return;
#pragma unroll 1
    for (int i = static_cast<int>(ptx::lane_id()); i < columns; i += 32)
        warp_row(p, m)[i] = 0;
    __syncwarp();
}

// All threads: turns the counts in m.rows into what came before each warp, and leaves the sums of all in
// m.counts, each written by the thread that has it in a loop over the columns.
template <int Threads>
__device__ __forceinline__ void sum_warps(const layout::RouteParams& p, RouteMemory& m) {
    const int columns = layout::num_columns(p.num_local);
    const int warps = layout::route_warps(Threads, p.endpoint.num_ranks);
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads) {
        std::uint32_t before = 0;
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
            const std::uint32_t count = m.rows[w * columns + i];
            m.rows[w * columns + i] = before;
            before += count;
        }
        m.counts[i] = before;
    }
}

// All threads: counts the CTA's tokens and hands the counts to the other CTAs. With one chunk the warps count
// in rows of their own, and `ids` ends as those of the last step; with several the CTA also notes what came
// before each block that starts in its range.
template <int Threads>
__device__ __forceinline__ void count_range(const layout::RouteParams& p, RouteMemory& m, const CtaRange& r,
                                            TokenIds& ids) {
    const int columns = layout::num_columns(p.num_local);
    std::uint32_t* counts = m.counts;
    if (p.one_chunk) {
        clear_warp_row<Threads>(p, m);
        counts = warp_row(p, m);
    }
#pragma unroll 1
    for (int first = r.first; first < r.end;) {
        const int block = first / layout::kBlockTokens;
        const int end = p.one_chunk ? r.end : min((block + 1) * layout::kBlockTokens, r.end);
        if (!p.one_chunk) {
            __syncthreads();
            std::uint32_t* row = p.block_counts + std::int64_t{block} * columns;
            if (first % layout::kBlockTokens == 0)
#pragma unroll 1
                for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads)
                    row[i] = m.counts[i];
            __syncthreads();
        }
        count_run(p, m.state, warp_run<Threads>(p, first, end), counts, true, ids);
        first = end;
    }
    if (p.one_chunk)
        sum_warps<Threads>(p, m);
    else
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

// All threads: the warps' rows of tokens [first, end) that are counted already.
template <int Threads>
__device__ __forceinline__ void recount(const layout::RouteParams& p, RouteMemory& m, int first, int end,
                                        TokenIds& ids) {
    clear_warp_row<Threads>(p, m);
    count_run(p, m.state, warp_run<Threads>(p, first, end), warp_row(p, m), false, ids);
    sum_warps<Threads>(p, m);
}

}  // namespace mega_moe::device
