#pragma once
#include <cstdint>

#include "device/combine/sum_rows.cuh"
#include "device/comm/wait.cuh"
#include "device/common/delay.cuh"
#include "device/common/trace.cuh"
#include "device/route/ids.cuh"
#include "device/route/tables.cuh"

// Combine: a rank sums the outputs of each token that it has experts of and pushes the sum to the token's
// owner rank, which adds the sums of all ranks. With EP=1 the first sum is the result.
namespace mega_moe::device {

// The expert in a slot of one of this rank's tokens, or the value for none.
__device__ __forceinline__ std::int64_t expert_of_slot(const layout::RouteParams& r, int token, int slot,
                                                       std::uint64_t epoch) {
    if (r.endpoint.num_ranks > 1)
        return ptx::load_relaxed_sys(published_row(r, r.endpoint.rank, token, epoch) + slot);
    return raw_id(r, std::int64_t{token} * r.top_k + slot);
}
__device__ __forceinline__ bool holds_expert(const layout::RouteParams& r, int token, int slot,
                                             std::uint64_t epoch) {
    const std::int64_t expert = expert_of_slot(r, token, slot, epoch);
    return expert >= 0 && expert < r.num_experts;
}

// Mask of the ranks that hold an expert of one of this rank's tokens.
__device__ __forceinline__ std::uint32_t ranks_of_token(const layout::RouteParams& r, int token,
                                                        std::uint64_t epoch) {
    const auto lane = static_cast<int>(ptx::lane_id());
    std::uint32_t mask = 0;
    if (lane < r.top_k) {
        const std::int64_t expert = expert_of_slot(r, token, lane, epoch);
        if (expert >= 0 && expert < r.num_experts)
            mask = 1u << (static_cast<unsigned>(expert) / static_cast<unsigned>(r.num_local));
    }
    return __reduce_or_sync(ptx::kAllLanes, mask);
}

// What travels with the rows, by a whole warp: `push` with the rows of a token, `sum` into the results of a
// token of this rank once the sums of all ranks are there.
struct NoPiggyback {
    __device__ __forceinline__ void push(const TokenRows&, const ChunkView&, bool) const {}
    __device__ __forceinline__ void sum(int, std::uint64_t, bool) const {}
};

// One warp's work on both sums, taking whichever is ready. All warps draw from the same
// lists.
template <class C, class Piggyback = NoPiggyback>
class Combiner {
  public:
    __device__ __forceinline__ Combiner(const layout::LayerParams& params, std::uint64_t launch,
                                        const Piggyback& piggyback = {})
        : p(params), e(params.route.endpoint), piggyback_(piggyback), epoch(launch) {
        num_chunks_ = table_word(p.route.summary, layout::kSummaryChunks);
        view_ = view_chunk(p, 0);
        const ChunkView last = view_chunk(p, num_chunks_ - 1);
        entries_ = last.first_resident + last.residents;
        bad_ = ptx::load_relaxed_sys(e.sync + layout::kBadIdEpochWord) == epoch;
    }

    __device__ __forceinline__ void run(Tracer<C::kTrace>& tracer) {
        tracer.start();
        ticket_ = draw_raw(layout::kPushTicket);
        const auto first = static_cast<int>(ptx::from_lane(ticket_, 0));
        if (first < entries_) entry_ = ptx::load_relaxed_gpu(p.route.push_list + first);
        after_ticket_ = draw_raw(layout::kPushTicket);
        fetch_push();
        draw_push();
        fetch_push();
        draw_owned();
        std::int64_t idle_since = 0;
        for (int polls = 0; push_ >= 0 || owned_ >= 0; ++polls) {
            const bool pushes = push_ >= 0 && push_ready();
            if (!pushes) count_pushes();
            if (!pushes && (owned_ < 0 || !owner_sum_ready())) {
                if (polls % kPollsPerCheck == 0 && gave_up(idle_since)) return;
                continue;
            }
            idle_since = 0;
            tracer.end(pushes ? TraceKind::kWaitPush : TraceKind::kWaitOwnerSum, chunk_, 0,
                       pushes ? push_ : owned_);
            const RowSum sum = pushes ? push_sum() : owner_sum();
            // What the lanes have seen of counters and flags holds for the whole warp.
            __syncwarp();
            sum_rows<C::kSumLoads>(sum, p.hidden);
            if (pushes)
                piggyback_.push(from_, view_, bad_);
            else
                piggyback_.sum(owned_, epoch, bad_);
            __syncwarp();
            tracer.end(pushes ? TraceKind::kPush : TraceKind::kOwnerSum, chunk_, 0, pushes ? push_ : owned_);
            if (pushes) {
                if (++uncounted_ == kPushesPerCount) count_pushes();
                draw_push();
                fetch_push();
            } else {
                draw_owned();
            }
        }
    }

  private:
    static constexpr std::uint32_t kPushesPerCount = 8;
    static constexpr unsigned kHalf = 16;
    static_assert(kMaxTopK <= kHalf, "an entry's rows in half of the lanes");

    // In lane 0.
    __device__ __forceinline__ std::uint32_t draw_raw(layout::CounterTicket which) {
        std::uint32_t ticket = 0;
        if (ptx::lane_id() == 0)
            ticket = ptx::fetch_add_relaxed_gpu(p.counters + which * layout::kCounterLine, 1);
        return ticket;
    }

    // The chunks' entries of push_list follow one another, so tickets number all of them. The next entry's
    // slots, the entry after it and the ticket after that are on their way while an entry is worked on: each
    // takes as long as a sum.
    __device__ __forceinline__ void draw_push() {
        push_ = next_push_;
        from_ = next_from_;
        missing_ = missing_ >> kHalf | 0xFFFFu << kHalf;
        while (push_ >= view_.first_resident + view_.residents) {
            count_pushes();
            if (++chunk_ >= num_chunks_) {
                push_ = -1;
                return;
            }
            view_ = view_chunk(p, chunk_);
        }
    }
    __device__ __forceinline__ void fetch_push() {
        next_push_ = static_cast<int>(ptx::from_lane(ticket_, 0));
        if (next_push_ < entries_) next_from_ = rows_of_entry(p.route, entry_);
        ticket_ = after_ticket_;
        const auto ticket = static_cast<int>(ptx::from_lane(ticket_, 0));
        if (ticket < entries_) entry_ = ptx::load_relaxed_gpu(p.route.push_list + ticket);
        after_ticket_ = draw_raw(layout::kPushTicket);
    }

    __device__ __forceinline__ void draw_owned() {
        owned_ = static_cast<int>(ptx::from_lane(draw_raw(layout::kOwnerTicket), 0));
        if (owned_ >= p.route.num_tokens) {
            owned_ = -1;
            return;
        }
        ranks_ = ranks_of_token(p.route, owned_, epoch);
    }

    // A poll takes as long as a load from memory, so the upper lanes poll for the next entry.
    __device__ __forceinline__ bool push_ready() {
        if (missing_ << kHalf == 0) return true;
        const unsigned lane = ptx::lane_id();
        const int next_slot = __shfl_sync(ptx::kAllLanes, next_from_.slot, lane % kHalf);
        const int slot = lane < kHalf ? from_.slot : next_slot;
        bool missing = false;
        if (static_cast<int>(lane % kHalf) < (lane < kHalf ? from_.rows : next_from_.rows)) {
            const std::uint32_t* done = p.counters + p.summed_done + slot / layout::kRowBlock;
            missing = ptx::load_acquire_gpu(done) < p.summed_wanted;
        }
        missing_ = ptx::ballot(missing);
        return missing_ << kHalf == 0;
    }

    __device__ __forceinline__ RowSum push_sum() {
        maybe_delay(p.delay_seed, static_cast<std::uint32_t>(push_));
        const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
        const bool last = e.num_ranks == 1;
        std::byte* out = last ? p.out + from_.token * row_bytes
                              : e.at<std::byte>(from_.rank, p.owner_sums) +
                                    (std::int64_t{from_.token} * e.num_ranks + e.rank) * row_bytes;
        if (!p.returns_rows) out = nullptr;
        return {p.summed, from_.slot + view_.row_of_slot, from_.rows, out, last && bad_};
    }

    // Entries of one chunk that are sent but not yet signaled: a fence for each would take as long as the
    // sum.
    __device__ __forceinline__ void count_pushes() {
        if (uncounted_ == 0) return;
        std::uint32_t sent = 0;
        if (ptx::lane_id() == 0) {
            // The other lanes' stores too, which the owner rank may read as soon as it sees the flag.
            if (e.num_ranks > 1) ptx::fence_sys();
            sent = ptx::fetch_add_acq_rel_gpu(p.counters + p.sent + chunk_, uncounted_) + uncounted_;
        }
        uncounted_ = 0;
        if (ptx::from_lane(sent, 0) == static_cast<std::uint32_t>(view_.residents))
            announce_chunk(p, epoch, chunk_);
    }

    // The ranks' sums for the token are here.
    __device__ __forceinline__ bool owner_sum_ready() {
        if (e.num_ranks == 1) return true;
        bool missing = false;
        if ((ranks_ >> ptx::lane_id() & 1) != 0) {
            const std::int64_t index =
                std::int64_t{ptx::lane_id()} * p.route.max_blocks + owned_ / layout::kBlockTokens;
            missing = ptx::load_acquire_sys(e.at<std::uint64_t>(e.rank, p.sent_flags) + index) < epoch;
        }
        return !ptx::any(missing);
    }

    __device__ __forceinline__ RowSum owner_sum() {
        // With EP=1 the push has written the result, but for tokens without an expert.
        const bool written = e.num_ranks == 1 && ranks_ != 0;
        // Lane i: the i-th rank of the mask.
        std::uint32_t left = ranks_;
        for (std::uint32_t i = 0; i < ptx::lane_id() && left != 0; ++i)
            left &= left - 1;
        const int rank = left == 0 ? 0 : __ffs(static_cast<int>(left)) - 1;
        std::byte* out = p.out + std::int64_t{owned_} * p.hidden * 2;
        return {e.at<const std::byte>(e.rank, p.owner_sums), owned_ * e.num_ranks + rank, __popc(ranks_),
                written || !p.returns_rows ? nullptr : out, bad_};
    }

    // Nothing was ready: check the time limit, and whether a rank has given up.
    __device__ __forceinline__ bool gave_up(std::int64_t& idle_since) {
        const std::int64_t now = ptx::global_timer();
        if (idle_since == 0) idle_since = now;
        const bool late = now - idle_since > e.progress_ns;
        const bool ends = ptx::any(late || abort_word(e) != 0);
        if (ends && ptx::lane_id() == 0) {
            const bool pushes = push_ >= 0;
            give_up(e, epoch,
                    {pushes ? Role::kPushInput : Role::kOwnerSum, Kind::kProgress,
                     static_cast<std::uint64_t>(pushes ? push_ : owned_), 0, 1});
        }
        return ends;
    }

  public:
    // One warp: signals all ranks that a chunk's sums for their tokens have arrived.
    static __device__ __forceinline__ void announce_chunk(const layout::LayerParams& p, std::uint64_t epoch,
                                                          int chunk) {
        const layout::Endpoint& e = p.route.endpoint;
        if (e.num_ranks == 1) return;
        __syncwarp();
        ptx::fence_sys();
        const std::int32_t* row = p.route.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
        const int first = table_word(row, layout::kChunkFirstToken) / layout::kBlockTokens;
        const auto end = static_cast<int>(layout::num_blocks(table_word(row, layout::kChunkEndToken)));
        for (int peer = 0; peer < e.num_ranks; ++peer)
            for (int block = first + static_cast<int>(ptx::lane_id()); block < end; block += 32)
                ptx::store_relaxed_sys(e.at<std::uint64_t>(peer, p.sent_flags) +
                                           std::int64_t{e.rank} * p.route.max_blocks + block,
                                       epoch);
    }

  private:
    const layout::LayerParams& p;
    const layout::Endpoint& e;
    Piggyback piggyback_;
    std::uint64_t epoch;
    ChunkView view_;
    TokenRows from_;
    int num_chunks_;
    int entries_;
    std::uint32_t uncounted_ = 0;
    TokenRows next_from_{};
    int next_push_ = 0;
    std::uint32_t ticket_ = 0;  // in lane 0, as the next
    std::uint32_t after_ticket_ = 0;
    std::uint64_t entry_ = 0;  // of the ticket
    int chunk_ = 0;
    int push_ = -1;
    int owned_ = -1;
    std::uint32_t ranks_ = 0;
    std::uint32_t missing_ = ~0u;  // lanes whose row of the entry, or of the next, was not there
    bool bad_ = false;
};

// One warp of one CTA: chunks that bring nothing to this rank have no last entry to signal them.
template <class C>
__device__ __forceinline__ void announce_empty_chunks(const layout::LayerParams& p, std::uint64_t epoch) {
    if (p.route.endpoint.num_ranks == 1) return;
    const int num_chunks = table_word(p.route.summary, layout::kSummaryChunks);
    for (int chunk = 0; chunk < num_chunks; ++chunk)
        if (view_chunk(p, chunk).residents == 0) Combiner<C>::announce_chunk(p, epoch, chunk);
}

// One warp of one CTA, as its last work: until every rank, also one that holds no expert of these tokens, has
// said that it is through with them. Only then may the caller overwrite x, and the next launch the staged
// copy.
__device__ __forceinline__ void await_all_ranks(const layout::LayerParams& p, std::uint64_t epoch) {
    const layout::RouteParams& r = p.route;
    const layout::Endpoint& e = r.endpoint;
    if (e.num_ranks == 1) return;
    const auto blocks = static_cast<int>(layout::num_blocks(r.num_tokens));
    for (int i = static_cast<int>(ptx::lane_id()); i < blocks * e.num_ranks; i += 32) {
        const std::int64_t index = std::int64_t{i / blocks} * r.max_blocks + i % blocks;
        const std::uint64_t* flag = e.at<std::uint64_t>(e.rank, p.sent_flags) + index;
        std::uint64_t seen;
        if (wait_for(e, [&] { return ptx::load_acquire_sys(flag); }, epoch, e.progress_ns, seen)) continue;
        give_up(e, epoch, {Role::kLastSums, Kind::kProgress, static_cast<std::uint64_t>(index), seen, epoch});
        return;
    }
}

}  // namespace mega_moe::device
