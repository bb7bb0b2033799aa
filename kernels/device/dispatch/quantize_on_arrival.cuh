#pragma once
#include <cstdint>

#include "device/dispatch/arrival.cuh"
#include "device/dispatch/source.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/quantize/arrived_groups.cuh"

namespace mega_moe::device {

// One warp: rows of its tokens, read and quantized through registers, `NumVectors` of 512 bytes at once.
// While these are quantized the next are on their way, and one fence covers several tokens: both take longer
// than the work itself.
template <class C, int NumVectors>
class QuantizedRowsOf {
  public:
    __device__ __forceinline__ QuantizedRowsOf(const layout::LayerParams& params, const ChunkView& chunk)
        : p(params), view(chunk), row_bytes(params.hidden * 2) {}

    // Handles at most this many tokens.
    __device__ __forceinline__ void quantize(TokensInOrder tokens, int left) {
        Piece piece{};
        if (left == 0 || !tokens.next(piece.of)) return;
        Vectors v;
        load(piece, v);
        for (bool more = true; more;) {
            Piece next = piece;
            next.offset += kPieceBytes;
            if (next.offset >= row_bytes) {
                next.offset = 0;
                ++next.moved;
            }
            const bool last = next.moved == C::kMoved;
            if (last) {
                next.moved = 0;
                more = --left > 0 && tokens.next(next.of);
            }
            Vectors ahead;
            if (kAhead && more) load(next, ahead);
            store(piece, v);
            if (last) stored(piece.of);
            if constexpr (kAhead)
                v = ahead;
            else if (more)
                load(next, v);
            piece = next;
        }
        count();
    }

  private:
    static constexpr int kVectors = NumVectors;
    // A communication warp has no registers for it.
    static constexpr bool kAhead = NumVectors > kQuad;
    static constexpr int kPieceBytes = kVectors * 512;
    static constexpr int kTokensPerCount = 4;
    struct Vectors {
        uint4 of[kVectors];
    };
    struct Piece {
        TokenRows of;
        int moved;   // which of LayerParams::moved
        int offset;  // bytes into the row
    };

    static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::lane_id()); }

    // Zeros beyond the row.
    __device__ __forceinline__ void load(const Piece& piece, Vectors& v) const {
        const std::byte* from = row_source<C>(p, p.moved[piece.moved], piece.of, row_bytes);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int at = piece.offset + i * 512 + lane() * 16;
            v.of[i] = {0, 0, 0, 0};
            if (at < row_bytes) v.of[i] = ptx::load_relaxed_sys(reinterpret_cast<const uint4*>(from + at));
        }
    }
    __device__ __forceinline__ void store(const Piece& piece, const Vectors& v) const {
        if (keeps_row(p)) {
            const std::int64_t row = __shfl_sync(ptx::kAllLanes, piece.of.slot, 0) + view.row_of_slot;
            std::byte* to = p.moved[piece.moved].pool + row * row_bytes;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int at = piece.offset + i * 512 + lane() * 16;
                if (at < row_bytes) ptx::store(to + at, v.of[i]);
            }
        }
#pragma unroll
        for (int first = 0; first < kVectors; first += kQuad) {
            uint4 quad[kQuad];
#pragma unroll
            for (int i = 0; i < kQuad; ++i)
                quad[i] = v.of[first + i];
            const int group = (piece.offset + first * 512) / 256;
            const int groups = row_bytes / 256 - group;
            if (groups > 0)
                quantize_arrived(p.codes[piece.moved], view, piece.of, p.hidden, group,
                                 min(groups, 2 * kQuad), p.rounding, quad);
        }
    }
    __device__ __forceinline__ void stored(const TokenRows& t) {
#pragma unroll
        for (int i = kTokensPerCount - 1; i > 0; --i)
            blocks_[i] = blocks_[i - 1];
        blocks_[0] = lane() < t.rows ? t.slot / layout::kRowBlock : -1;
        if (++uncounted_ == kTokensPerCount) count();
    }
    __device__ __forceinline__ void count() {
        ptx::fence_proxy_async_global();
        __syncwarp();
        ptx::fence_gpu();
#pragma unroll
        for (int i = 0; i < kTokensPerCount; ++i)
            if (i < uncounted_ && blocks_[i] >= 0)
                ptx::add_relaxed_gpu(p.counters + p.arrived + blocks_[i],
                                     arrival<PullPass::kCodes>(p, lane()));
        uncounted_ = 0;
    }

    const layout::LayerParams& p;
    const ChunkView& view;
    int row_bytes;
    int uncounted_ = 0;
    int blocks_[kTokensPerCount] = {};  // of each lane's slots of the tokens that are not counted
};

}  // namespace mega_moe::device
