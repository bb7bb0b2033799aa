#pragma once
#include <cstdint>

#include "device/comm/grid_barrier.cuh"
#include "device/route/count.cuh"
#include "device/route/place.cuh"
#include "device/route/publish.cuh"
#include "device/route/scan.cuh"
#include "layout/route_params.h"

// The routing phase of a launch: all CTAs of all ranks, one grid barrier, no slot taken by an atomic
// operation, so that the tables depend on the routing alone. A later phase of the same launch needs a grid
// barrier of its own before it reads them.
namespace mega_moe::device {

__device__ __forceinline__ RouteMemory route_memory(const layout::RouteParams& p, std::byte* shared,
                                                    int threads) {
    const layout::RouteShared at =
        layout::make_route_shared(threads, p.endpoint.num_ranks, p.num_local, p.max_blocks, p.one_chunk);
    const auto words = [&](std::int64_t offset) { return reinterpret_cast<std::uint32_t*>(shared + offset); };
    return {*reinterpret_cast<layout::RouteState*>(shared + at.state),
            words(at.counts),
            words(at.rows),
            words(at.masks),
            words(at.cta_rows),
            words(at.before)};
}

// What a launch does while the ids of the other ranks are on their way: nothing, when it only routes.
struct NoWork {
    __device__ __forceinline__ void operator()(std::uint64_t) const {}
};

// All threads: learns the number of the launch and, with several ranks, opens it with them. `meanwhile` is
// called with that number by all threads, once the own ids are out, if any are to go.
template <int Threads, class Work>
__device__ __forceinline__ void begin_route(const layout::RouteParams& p, RouteMemory& m,
                                            const Work& meanwhile) {
    const layout::Endpoint& e = p.endpoint;
    const int columns = layout::num_columns(p.num_local);
    // A thread without a token of the first tile, so that its wait for memory does not delay the ids.
    if (threadIdx.x == Threads - 32) {
        m.state.epoch = ptx::load_relaxed_sys(e.control + layout::kEpochWord) + 1;
        m.state.lost = abort_word(e) != 0;
        m.state.stuck = 0;
        m.state.refused = p.refuse ? e.rank + 1 : 0;
        m.state.most_tokens = p.refuse ? 0 : p.num_tokens;
        m.state.tokens[e.rank] = m.state.most_tokens;
        if (m.state.lost != 0)
            give_up(e, m.state.epoch,
                    {Role::kHeader, Kind::kAborted, static_cast<std::uint64_t>(e.rank), 0, 0});
    }
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads)
        m.counts[i] = 0;
    __syncthreads();
    // The sums that the next launch adds to; no CTA of this one reads them.
    const std::int64_t bank = static_cast<std::int64_t>((m.state.epoch + 1) % 2) * layout::kMaxGroups;
    for (int group = static_cast<int>(blockIdx.x); group < layout::kMaxGroups;
         group += static_cast<int>(gridDim.x))
        for (int i = static_cast<int>(threadIdx.x); i < columns; i += Threads)
            p.group_counts[(bank + group) * columns + i] = 0;
    if (m.state.lost != 0) return;
    const bool alone = e.num_ranks == 1;
    if (!alone) {
        if (blockIdx.x == 0) send_header(p, m.state.epoch);
        // Either way the threads meet, so that all have read the state before the first warp writes it.
        if (p.refuse)
            __syncthreads();
        else
            publish_blocks<Threads>(p, m.state.epoch);
    }
    meanwhile(m.state.epoch);
    if (alone) return;
    if (threadIdx.x < 32) await_headers(p, m.state);
    __syncthreads();
}

// All threads of CTA 0.
template <int Threads>
__device__ __forceinline__ void summarise_fault(const layout::RouteParams& p, Kind kind) {
    const auto length = static_cast<int>(layout::summary_length(p.num_local, p.endpoint.num_ranks));
    for (int i = static_cast<int>(threadIdx.x); i < length; i += Threads)
        p.summary[i] = i == layout::kSummaryStatus ? static_cast<std::int32_t>(kind) : -1;
}

// All threads: the chunks that this CTA's tokens are in. CTA 0 walks over all of them, to count them.
template <int Threads>
__device__ __forceinline__ int place_chunks(const layout::RouteParams& p, RouteMemory& m, const CtaRange& r,
                                            TokenIds& ids) {
    const int most_tokens = m.state.most_tokens;
    const auto blocks = static_cast<int>(layout::num_blocks(most_tokens));
    const int used_ctas = layout::ceil_div(most_tokens, r.range_tokens);
    if (!p.one_chunk) sum_blocks<Threads>(p, m, r, used_ctas, blocks);
    Segment s{};
    do {
        s.end_block = chunk_end(p, m, s.first_block, blocks);
        const int chunk_first = s.first_block * layout::kBlockTokens;
        s.first = max(chunk_first, r.first);
        s.end = min(s.end_block * layout::kBlockTokens, r.end);
        s.starts_here = s.chunk == 0 ? blockIdx.x == 0 : s.first == chunk_first;
        if (s.first < s.end || (s.chunk == 0 && blockIdx.x == 0)) {
            // With several chunks the warps of a segment are not those of the CTA's range.
            if (!p.one_chunk) recount<Threads>(p, m, s.first, s.end, ids);
            place_columns<Threads>(p, m, r, s, used_ctas, blocks);
            place_run(p, m, warp_run<Threads>(p, s.first, s.end), ids);
        }
        ++s.chunk;
        s.first_block = s.end_block;
    } while (s.first_block < blocks && (s.first_block * layout::kBlockTokens < r.end || blockIdx.x == 0));
    return s.chunk;
}

// The whole phase. `shared` has layout::make_route_shared(...).total bytes, aligned to 16. False when the
// launch ended without tables: a rank refused it, or a wait was given up.
template <int Threads, class Work = NoWork>
__device__ __forceinline__ bool route(const layout::RouteParams& p, std::byte* shared,
                                      const Work& meanwhile = {}) {
    static_assert(Threads % 32 == 0 && Threads >= 96, "one warp for each of three scans");
    const layout::Endpoint& e = p.endpoint;
    RouteMemory m = route_memory(p, shared, Threads);
    begin_route<Threads>(p, m, meanwhile);
    const layout::Work work =
        layout::split_work(m.state.most_tokens, static_cast<int>(gridDim.x), Threads, e.num_ranks);
    const int first = min(static_cast<int>(blockIdx.x) * work.range_tokens, m.state.most_tokens);
    const CtaRange range{work.range_tokens, first, min(first + work.range_tokens, m.state.most_tokens)};
    const bool going = m.state.lost == 0 && m.state.refused == 0;
    if (e.num_ranks > 1 && going) {
        await_ids<Threads>(p, m.state, range.first, range.end);
        __syncthreads();
    }
    TokenIds ids = masked_ids();
    if (going && m.state.stuck == 0) count_range<Threads>(p, m, range, ids);
    __syncthreads();
    if (threadIdx.x == 0 && m.state.lost == 0 && m.state.stuck == 0) {
        if (!grid_barrier(e, m.state.epoch))
            m.state.stuck = 1;
        else if (blockIdx.x == 0)
            // All CTAs have read the word before they came to the barrier.
            e.control[layout::kEpochWord] = m.state.epoch;
    }
    __syncthreads();
    const bool failed = m.state.lost != 0 || m.state.stuck != 0;
    if (failed || !going) {
        if (blockIdx.x == 0) summarise_fault<Threads>(p, failed ? Kind::kAborted : Kind::kRefused);
        return false;
    }
    const int chunks = place_chunks<Threads>(p, m, range, ids);
    if (blockIdx.x != 0) return true;
    if (threadIdx.x < static_cast<unsigned>(e.num_ranks))
        p.summary[layout::kSummaryWords + threadIdx.x] = m.state.tokens[threadIdx.x];
    if (threadIdx.x != 0) return true;
    const bool bad = ptx::load_relaxed_sys(e.sync + layout::kBadIdEpochWord) == m.state.epoch;
    p.summary[layout::kSummaryStatus] = bad ? static_cast<std::int32_t>(Kind::kBadId) : 0;
    p.summary[layout::kSummaryChunks] = chunks;
    return true;
}

}  // namespace mega_moe::device
