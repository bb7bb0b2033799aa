#pragma once
#include <cstdint>

#include "device/common/delay.cuh"
#include "device/common/ring_cursor.cuh"
#include "device/common/trace.cuh"
#include "device/dispatch/source.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/global_memory.cuh"

// Dispatch of a quantized layer: rows of e4m3 and their scale factors. Rows are half as long as in bf16 and
// needed nearly twice as fast, so more pieces are in flight than a warp can track in registers.
namespace mega_moe::device {

// Bytes of scale factors for a number of bytes of e4m3.
__device__ __forceinline__ int bytes_of_scales(int bytes) {
    return bytes / layout::kQuantGroup * 4;
}

// One warp, through registers: a token's scale factors to its slots.
__device__ __forceinline__ void copy_scales(const layout::LayerParams& p, const ChunkView& view,
                                            const TokenRows& t, const std::byte* from) {
    const int row_bytes = bytes_of_scales(p.hidden);
#pragma unroll 1
    for (int first = 0; first < row_bytes; first += 512) {
        const int at = first + static_cast<int>(ptx::lane_id()) * 16;
        uint4 v{};
        if (at < row_bytes) v = ptx::load_relaxed_sys(reinterpret_cast<const uint4*>(from + at));
#pragma unroll 1
        for (int slot = 0; slot < t.rows; ++slot) {
            const std::int64_t row = __shfl_sync(ptx::kAllLanes, t.slot, slot) + view.row_of_slot;
            if (at < row_bytes) ptx::store(p.moved_scales.pool + row * row_bytes + at, v);
        }
    }
}

// One warp: its share of the tokens of a chunk, in the order of their first experts, by bulk copies through
// its buffers.
// The state of a piece is kept in shared memory until its arrival is signaled.
template <class C>
class QuantizedPuller {
  public:
    __device__ __forceinline__ QuantizedPuller(const layout::LayerParams& params, const typename C::Smem& map)
        : p(params), shared(map) {}

    __device__ __forceinline__ void pull_chunk(const ChunkView& view, int chunk, int first, int step,
                                               Tracer<C::kTrace>& tracer) {
        TokensInOrder tokens(p, view, first, step);
        TokenRows token{};
        int offset = 0;  // of the next piece in the token's row; 0: the next token's
        int under_way = 0;
        bool ended = false;
        while (!ended || under_way > 0) {
            if (!ended && offset == 0) ended = !tokens.next(token);
            if (!ended) {
                offset = load(token, offset);
                if (++under_way <= kAhead) continue;
            }
            if (under_way == 0) break;
            store(view);
            --under_way;
            tracer.end(TraceKind::kPull, chunk, 0, token.token);
        }
        ptx::bulk_wait<0>();
        while (arriving_ != landing_piece_)
            arrive();
        __syncwarp();
    }

  private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::lane_id()); }

    // One buffer takes stores while the others load.
    static constexpr int kAhead = C::kPullBuffers - 1;
    // Most pieces that may be stored but not yet written.
    static constexpr int kStoring = 2;
    static_assert(kAhead + 1 + kStoring <= layout::kPullPieces, "pieces");
    // A piece's last word: its rows, its place in its row in pieces, and whether it is the last of the token.
    static constexpr int kFacts = layout::kMaxSlotsPerToken;
    static constexpr std::uint32_t kLast = 1u << 31;

    __device__ __forceinline__ int piece_bytes(int offset) const {
        return min(p.hidden - offset, C::kPullBytes);
    }

    // Starts the load of the token's piece at `offset`, and returns the next one's.
    __device__ __forceinline__ int load(const TokenRows& t, int offset) {
        const int bytes = piece_bytes(offset);
        const bool last = offset + bytes == p.hidden;
        maybe_delay(p.delay_seed, static_cast<std::uint32_t>(t.token));
        // The stores that last read the buffer.
        ptx::bulk_wait_read<0>();
        __syncwarp();
        std::uint32_t* piece = shared.piece(loading_piece_);
        if (lane() < t.rows) piece[lane()] = static_cast<std::uint32_t>(t.slot);
        if (lane() == 0) {
            piece[kFacts] =
                static_cast<std::uint32_t>(t.rows | offset / C::kPullBytes << 8) | (last ? kLast : 0);
            const std::uint32_t barrier = shared.pulled(loading_.at);
            const int scales = bytes_of_scales(bytes);
            ptx::mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(bytes + scales));
            ptx::bulk_load(shared.pull_buffer(loading_.at),
                           row_source<C>(p, p.moved[0], t, p.hidden) + offset,
                           static_cast<std::uint32_t>(bytes), barrier);
            ptx::bulk_load(
                shared.pull_scales(loading_.at),
                row_source<C>(p, p.moved_scales, t, bytes_of_scales(p.hidden)) + bytes_of_scales(offset),
                static_cast<std::uint32_t>(scales), barrier);
        }
        __syncwarp();
        loading_.next();
        loading_piece_ = next_piece(loading_piece_);
        return last ? 0 : offset + bytes;
    }
    // Stores the piece that was loaded first, once it is there, and signals one stored before.
    __device__ __forceinline__ void store(const ChunkView& view) {
        const std::uint32_t* piece = shared.piece(landing_piece_);
        const std::uint32_t facts = piece[kFacts];
        const int offset = static_cast<int>(facts >> 8 & 0xFF) * C::kPullBytes;
        const int bytes = piece_bytes(offset);
        ptx::mbarrier_wait(shared.pulled(landing_.at), landing_.parity);
        if (lane() < static_cast<int>(facts & 0xFF)) {
            const std::int64_t row = static_cast<int>(piece[lane()]) + view.row_of_slot;
            ptx::bulk_store(p.moved[0].pool + row * p.hidden + offset, shared.pull_buffer(landing_.at),
                            static_cast<std::uint32_t>(bytes));
            ptx::bulk_store(p.moved_scales.pool + row * bytes_of_scales(p.hidden) + bytes_of_scales(offset),
                            shared.pull_scales(landing_.at),
                            static_cast<std::uint32_t>(bytes_of_scales(bytes)));
        }
        ptx::bulk_commit();
        landing_.next();
        landing_piece_ = next_piece(landing_piece_);
        ptx::bulk_wait<kStoring>();
        if (++stored_ > kStoring) arrive();
    }
    // The oldest piece that is stored is written.
    __device__ __forceinline__ void arrive() {
        const std::uint32_t* piece = shared.piece(arriving_);
        const std::uint32_t facts = piece[kFacts];
        if ((facts & kLast) != 0 && lane() < static_cast<int>(facts & 0xFF))
            ptx::add_release_gpu(p.counters + p.arrived + piece[lane()] / layout::kRowBlock, 1);
        arriving_ = next_piece(arriving_);
        --stored_;
    }
    static __device__ __forceinline__ int next_piece(int piece) {
        return piece + 1 == layout::kPullPieces ? 0 : piece + 1;
    }

    const layout::LayerParams& p;
    const typename C::Smem& shared;
    RingCursor<C::kPullBuffers> loading_;
    RingCursor<C::kPullBuffers> landing_;
    int loading_piece_ = 0;
    int landing_piece_ = 0;
    int arriving_ = 0;
    int stored_ = 0;  // pieces that are not signaled
};

}  // namespace mega_moe::device
