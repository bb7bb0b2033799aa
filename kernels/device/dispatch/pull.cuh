#pragma once
#include <cstdint>
#include <type_traits>

#include "device/common/delay.cuh"
#include "device/common/ring_cursor.cuh"
#include "device/common/trace.cuh"
#include "device/dispatch/arrival.cuh"
#include "device/dispatch/own_rows.cuh"
#include "device/dispatch/pull_fp8.cuh"
#include "device/dispatch/quantize_on_arrival.cuh"
#include "device/dispatch/source.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/quantize/arrived_groups.cuh"

// Dispatch: rows of x, and of dy in the backward, from their ranks into the pools. Each token is read once,
// however many experts it has here.
namespace mega_moe::device {

// A piece of a token's row on its way through one of the buffers.
struct PullPiece {
    TokenRows of;
    int moved;   // which of LayerParams::moved
    int offset;  // bytes into the row
    int bytes;
    bool last;  // of the token
};

// One warp: its share of the tokens of a chunk, in the order of their first experts, by bulk copies through
// its buffers. The loads of the next pieces are under way while a piece is stored.
template <class C>
class Puller {
  public:
    __device__ __forceinline__ Puller(const layout::LayerParams& params, const typename C::Smem& map)
        : p(params), shared(map), row_bytes(params.hidden * 2) {}

    __device__ __forceinline__ void pull_chunk(const ChunkView& view, int chunk, int first, int step,
                                               Tracer<C::kTrace>& tracer) {
        TokensInOrder tokens(p, view, first, step);
        ended_ = false;
        // The last pieces in flight, oldest first; an entry without bytes is empty.
        PullPiece ahead[kAhead] = {};
        PullPiece newest{};
        newest.last = true;
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            ahead[i] = start_next(view, tokens, newest);
        PullPiece before{};
        while (ahead[0].bytes > 0) {
            const PullPiece piece = ahead[0];
#pragma unroll
            for (int i = 0; i + 1 < kAhead; ++i)
                ahead[i] = ahead[i + 1];
            ahead[kAhead - 1] = start_next(view, tokens, newest);
            ptx::mbarrier_wait(shared.pulled(landing_.at), landing_.parity);
            if (takes_row(piece.of)) {
                const std::int64_t row = piece.of.slot + view.row_of_slot;
                ptx::bulk_store(p.moved[piece.moved].pool + row * row_bytes + piece.offset,
                                shared.pull_buffer(landing_.at), static_cast<std::uint32_t>(piece.bytes));
            }
            ptx::bulk_commit();
            landing_.next();
            stored(before);
            if (uncounted_ == kRowsPerCount) {
                ptx::bulk_wait<1>();
                count();
            }
            before = piece;
            tracer.end(TraceKind::kPull, chunk, 0, piece.of.token);
        }
        stored(before);
        ptx::bulk_wait<0>();
        count();
        __syncwarp();
    }

  private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::lane_id()); }

    // Some buffers take stores while the others load.
    static constexpr int kStoring = C::kPullBuffers > 3 ? 2 : 1;
    static constexpr int kAhead = C::kPullBuffers - kStoring;
    static constexpr PullPass kPass = C::kQuantizesOnArrival ? PullPass::kSpread : PullPass::kWhole;

    // Whether this CTA has already stored the row in the token's first slot.
    __device__ __forceinline__ bool first_has_row() const {
        return kPass == PullPass::kSpread && keeps_row(p);
    }
    __device__ __forceinline__ bool takes_row(const TokenRows& t) const {
        return lane() < t.rows && (lane() > 0 || !first_has_row());
    }

    // Advances `newest` to the next piece and starts its load; an empty piece at the end.
    __device__ __forceinline__ PullPiece start_next(const ChunkView& view, TokensInOrder& tokens,
                                                    PullPiece& newest) {
        PullPiece piece = newest;
        if (newest.last) {
            piece.moved = 0;
            piece.offset = 0;
            do {
                if (ended_ || !tokens.next(piece.of)) {
                    ended_ = true;
                    return {};
                }
            } while (first_has_row() && piece.of.rows == 1);
        } else if (newest.offset + newest.bytes == row_bytes) {
            piece.moved = newest.moved + 1;
            piece.offset = 0;
        } else {
            piece.offset += newest.bytes;
        }
        if constexpr (C::kMoved == 1) piece.moved = 0;
        piece.bytes = min(row_bytes - piece.offset, C::kPullBytes);
        piece.last = piece.offset + piece.bytes == row_bytes && piece.moved == C::kMoved - 1;
        maybe_delay(p.delay_seed, static_cast<std::uint32_t>(piece.of.token));
        // Wait for the stores that last read the buffer; those of kStoring - 1 pieces are newer.
        ptx::bulk_wait_read<kStoring - 1>();
        __syncwarp();
        load(view, piece);
        newest = piece;
        return piece;
    }
    __device__ __forceinline__ void load(const ChunkView& view, const PullPiece& piece) {
        if (lane() == 0) {
            const layout::MovedRows& moved = p.moved[piece.moved];
            const std::byte* from =
                first_has_row() ? moved.pool + (std::int64_t{piece.of.slot} + view.row_of_slot) * row_bytes
                                : row_source<C>(p, moved, piece.of, row_bytes);
            const std::uint32_t barrier = shared.pulled(loading_.at);
            ptx::mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(piece.bytes));
            ptx::bulk_load(shared.pull_buffer(loading_.at), from + piece.offset,
                           static_cast<std::uint32_t>(piece.bytes), barrier);
        }
        __syncwarp();
        loading_.next();
    }
    // A token whose last piece is on its way to the pools; counted once it has arrived.
    __device__ __forceinline__ void stored(const PullPiece& piece) {
        if (!piece.last) return;
#pragma unroll
        for (int i = kRowsPerCount - 1; i > 0; --i)
            blocks_[i] = blocks_[i - 1];
        blocks_[0] = takes_row(piece.of) ? piece.of.slot / layout::kRowBlock : -1;
        ++uncounted_;
    }
    __device__ __forceinline__ void count() {
        if constexpr (C::kQuantizesOnArrival) {
            ptx::fence_proxy_async_global();
            __syncwarp();
        }
        ptx::fence_gpu();
#pragma unroll
        for (int i = 0; i < kRowsPerCount; ++i)
            if (i < uncounted_ && blocks_[i] >= 0)
                ptx::add_relaxed_gpu(p.counters + p.arrived + blocks_[i], arrival<kPass>(p, lane()));
        uncounted_ = 0;
    }

    const layout::LayerParams& p;
    const typename C::Smem& shared;
    int row_bytes;
    RingCursor<C::kPullBuffers> loading_;
    RingCursor<C::kPullBuffers> landing_;
    bool ended_ = false;
    // The fence before an arrival is counted takes as long as a row: one for several tokens.
    static constexpr int kRowsPerCount = 4;
    int uncounted_ = 0;
    int blocks_[kRowsPerCount] = {};  // of each lane's slots of the tokens that are not counted
};

// Tokens that are copied before the warps take their roles.
template <class C>
__device__ __forceinline__ int first_copied(const layout::LayerParams& p) {
    return p.first_per_warp * (C::kThreads / 32) * static_cast<int>(ptx::num_ctas());
}

// One warp, through registers: up to first_per_warp of the tokens.
template <class C>
__device__ __forceinline__ void copy_some(const layout::LayerParams& p, const ChunkView& view,
                                          TokensInOrder tokens) {
    constexpr int kVectors = 8;  // in flight per lane
    const int row_bytes = p.hidden * C::kMovedBytes;
    const int lane_bytes = static_cast<int>(ptx::lane_id()) * 16;
    TokenRows t{};
    for (int i = 0; i < p.first_per_warp && tokens.next(t); ++i) {
#pragma unroll 1
        for (int moved = 0; moved < C::kMoved; ++moved) {
            const std::byte* from = row_source<C>(p, p.moved[moved], t, row_bytes);
            for (int at = lane_bytes; at < row_bytes; at += kVectors * 512) {
                uint4 v[kVectors];
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
                    if (at + j * 512 < row_bytes)
                        v[j] = ptx::load_relaxed_sys(reinterpret_cast<const uint4*>(from + at + j * 512));
#pragma unroll 1
                for (int slot = 0; slot < t.rows; ++slot) {
                    const std::int64_t row = __shfl_sync(ptx::kAllLanes, t.slot, slot) + view.row_of_slot;
                    std::byte* to = p.moved[moved].pool + row * row_bytes;
#pragma unroll
                    for (int j = 0; j < kVectors; ++j)
                        if (at + j * 512 < row_bytes) ptx::store(to + at + j * 512, v[j]);
                }
            }
        }
        if constexpr (C::kDispatchesFp8)
            copy_scales(p, view, t, row_source<C>(p, p.moved_scales, t, p.hidden / 32));
        ptx::fence_proxy_async_global();
        __syncwarp();
        if (static_cast<int>(ptx::lane_id()) < t.rows)
            ptx::add_release_gpu(p.counters + p.arrived + t.slot / layout::kRowBlock, 1);
    }
}

// All warps: what the first tiles need, so that they do not wait for one warp of each CTA.
template <class C>
__device__ __forceinline__ void copy_first_rows(const layout::LayerParams& p, std::uint64_t epoch) {
    bool lost = false;
    await_staged_x<C>(p, epoch, lost);
    if (lost) return;
    const ChunkView view = view_chunk(p, 0);
    const int warp = static_cast<int>(ptx::thread_id()) / 32;
    const auto ctas = static_cast<int>(ptx::num_ctas());
    const int first = warp * ctas + static_cast<int>(ptx::cta_id());
    const int step = C::kThreads / 32 * ctas;
    if constexpr (C::kQuantizesOnArrival) {
        RowRun run;
        if (!has_own_codes(p))
            QuantizedRowsOf<C, 2 * kQuad>(p, view).quantize(TokensInOrder(p, view, first, step),
                                                            p.first_per_warp);
        else if (RunsInOrder(p.route, 0, first, step).next(run))
            copy_run(p, view, run);
    } else {
        copy_some<C>(p, view, TokensInOrder(p, view, first, step));
    }
}

// A communication warp with EP=1, where the rank has quantized its tokens: its share of a chunk's rows. Both
// take half of the first chunk, the only one whose rows tiles wait for, and which waits for nothing: to pull
// a later one may need what the second is to send.
template <class C>
__device__ __forceinline__ void copy_runs(const layout::LayerParams& p, int chunk, int warp,
                                          Tracer<C::kTrace>& tracer) {
    const auto ctas = static_cast<int>(ptx::num_ctas());
    const auto cta = static_cast<int>(ptx::cta_id());
    // Each warp copies one run before the warps take their roles.
    const int first = chunk == 0 ? C::kThreads / 32 * ctas + warp * ctas : 0;
    RunsInOrder runs(p.route, chunk, first + cta, chunk == 0 ? 2 * ctas : ctas);
    const ChunkView view = view_chunk(p, chunk);
    for (RowRun run; runs.next(run);) {
        copy_run(p, view, run);
        tracer.end(TraceKind::kPull, chunk, 0, 0);
    }
}

struct NoPreparation {
    __device__ __forceinline__ void operator()(int, bool&) const {}
};

// One warp: this CTA's share of all chunks. `prepare(chunk, lost)` comes before the rows of a chunk.
template <class C, class Prepare = NoPreparation>
__device__ __forceinline__ void pull_rows(const layout::LayerParams& p, const typename C::Smem& shared,
                                          std::uint64_t epoch, Tracer<C::kTrace>& tracer,
                                          const Prepare& prepare = {}) {
    const int num_chunks = table_word(p.route.summary, layout::kSummaryChunks);
    const auto cta = static_cast<int>(ptx::cta_id());
    const auto ctas = static_cast<int>(ptx::num_ctas());
    bool lost = false;
    tracer.start();
    std::conditional_t<C::kDispatchesFp8, QuantizedPuller<C>, Puller<C>> puller(p, shared);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        await_free_chunk(p, epoch, chunk, lost);
        prepare(chunk, lost);
        tracer.end(TraceKind::kWaitPull, chunk, 0, 0);
        const ChunkView view = view_chunk(p, chunk);
        int first = cta + (chunk == 0 ? first_copied<C>(p) : 0);
        if constexpr (C::kQuantizesOnArrival) {
            if (has_own_codes(p))
                copy_runs<C>(p, chunk, 0, tracer);
            else
                QuantizedRowsOf<C, kQuad>(p, view).quantize(TokensInOrder(p, view, first, ctas),
                                                            view.residents);
            if (!p.spreads_rows) continue;
            first = cta;
        }
        puller.pull_chunk(view, chunk, first, ctas, tracer);
    }
}

}  // namespace mega_moe::device
