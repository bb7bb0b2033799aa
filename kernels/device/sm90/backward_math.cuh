#pragma once
#include <cstdint>

#include "device/schedule/backward_tile.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/epilogue/activate.cuh"
#include "device/sm90/epilogue/saved_gate_up.cuh"
#include "device/sm90/epilogue/store_rows.cuh"
#include "device/sm90/stages.cuh"
#include "device/sm90/wgrad_store.cuh"

namespace mega_moe::device::sm90 {

// One warpgroup: its part of this CTA's tiles.
template <class C>
class BackwardMath {
  public:
    __device__ __forceinline__ BackwardMath(const layout::BackwardParams& params, const Smem<C>& map)
        : p(params), shared(map) {
        const int warp = static_cast<int>(ptx::thread_id()) / 32 - 4;
        first_row_ = warp / 4 * layout::kRowBlock;
        warp_row_ = first_row_ + warp % 4 * 16;
        buffer_ = shared.store_buffer(warp);
    }

    __device__ __forceinline__ void run(Tracer<C::kTrace>& tracer) {
        RingCursor<C::kRing> ring;
        tracer.start();
        for (;; ring.next()) {
            signal_.wait(shared.ring_full(ring.at), ring.parity, lane());
            const BackwardTile t = await_record<BackwardTile>(shared, ring);
            __syncwarp();
            if (lane() == 0) ptx::mbarrier_arrive(shared.ring_empty(ring.at));
            if (t.kind == kEnd) break;
            if (t.kind == kDzTile)
                dz_tile(t, tracer);
            else if (t.kind == kDxTile)
                dx_tile(t, tracer);
            else
                gradient(t, tracer);
        }
        signal_.publish(lane());
        // Stores that are not yet signaled still read this CTA's shared memory.
        ptx::bulk_wait<0>();
    }

  private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::lane_id()); }
    // The warpgroup's half of A: 64 rows in K-major, a block in MN-major.
    __device__ __forceinline__ std::uint32_t a_offset() const {
        return static_cast<std::uint32_t>(first_row_ * kOperandRowBytes);
    }

    template <Major A, Major B, int Count>
    __device__ __forceinline__ void multiply(float (&d)[Count], int k_blocks, bool any_rows) {
        signal_.wait(shared.full(stage_.at), stage_.parity, lane());
        const int last =
            multiply_tile<C, A, B>(d, shared, stage_, k_blocks, a_offset(), any_rows, signal_, lane());
        ptx::wgmma_wait<0>();
        release_stage<C>(shared, last, lane());
    }

    // Gate and up, recomputed or as the forward saved them, the gradient of h, and from these in registers
    // dz, h and a part of dtopk.
    __device__ __forceinline__ void dz_tile(const BackwardTile& t, Tracer<C::kTrace>& tracer) {
        const bool any_rows = t.rows > first_row_;
        std::uint32_t gate[32], up[32];
        if (C::kSavesGateUp && (t.flags & kSaved) != 0) {
            // For a half without rows this loads stale memory, which is not used.
            load_gate_up(
                p.saved.memory + layout::saved_offset(t.slot + first_row_, t.column / layout::kSavedColumns,
                                                      p.intermediate / layout::kSavedColumns,
                                                      warp_row_ / 16 % 4, lane()),
                gate, up);
        } else {
            float z[128];
#pragma unroll
            for (int i = 0; i < 128; ++i)
                z[i] = 0.0f;
            multiply<Major::kK, Major::kK>(z, t.k_blocks, any_rows);
            // Rounded as the forward does, and half the registers.
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                gate[i] = ptx::convert_bf16x2(z[2 * i], z[2 * i + 1]);
                up[i] = ptx::convert_bf16x2(z[64 + 2 * i], z[64 + 2 * i + 1]);
            }
        }
        float weight[2];
        std::uint32_t mask[2];
        float dw[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp_row_ + lane() / 4 + 8 * i;
            mask[i] = row < t.rows ? 0xFFFFFFFFu : 0;
            weight[i] = 0.0f;
            if (row < t.rows)
                weight[i] = __uint_as_float(
                    static_cast<std::uint32_t>(ptx::load_relaxed_gpu(p.route.slots + t.slot + row) >> 32));
        }
        float dh[64];
#pragma unroll
        for (int i = 0; i < 64; ++i)
            dh[i] = 0.0f;
        multiply<Major::kK, Major::kMn>(dh, t.k_blocks, any_rows);
        if (!any_rows) return;
        tracer.end(TraceKind::kDz, t.chunk, t.expert, trace_index(t, first_row_));
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            std::uint32_t h[16];
            std::uint32_t* g = gate + 16 * block;
            std::uint32_t* u = up + 16 * block;
            with_activation(p.activation, [&](const auto& act) {
                activation_backward_bf16(act, g, u, h, dh + 32 * block, weight, mask, dw);
            });
            const int column = t.column + block * 64;
            const int row = t.pool_row + warp_row_;
            store_words(h, &p.h_store, column, row);
            store_words(g, &p.dz_store, column, row);
            store_words(u, &p.dz_store, p.intermediate + column, row);
        }
        if (p.needs_dtopk) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                dw[i] += __shfl_xor_sync(ptx::kAllLanes, dw[i], 1);
                dw[i] += __shfl_xor_sync(ptx::kAllLanes, dw[i], 2);
                const std::int64_t row = t.pool_row + warp_row_ + lane() / 4 + 8 * i;
                if (lane() % 4 == 0)
                    ptx::store(p.dtopk_parts + row * (p.intermediate / layout::kDtopkColumns) +
                                   t.column / layout::kDtopkColumns,
                               dw[i]);
            }
        }
        __syncwarp();
        signal_.defer(p.counters + p.dz_done + (t.slot + first_row_) / layout::kRowBlock, nullptr, lane());
        tracer.end(TraceKind::kStoreDz, t.chunk, t.expert, trace_index(t, first_row_));
    }
    __device__ __forceinline__ void store_words(const std::uint32_t* words, const layout::TensorMap* map,
                                                int column, int row) {
        store_block([&] { stage_words(words, buffer_, lane()); }, map, buffer_, column, row, lane());
    }

    __device__ __forceinline__ void dx_tile(const BackwardTile& t, Tracer<C::kTrace>& tracer) {
        const bool any_rows = t.rows > first_row_;
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        multiply<Major::kK, Major::kMn>(d, t.k_blocks, any_rows);
        if (!any_rows) return;
        tracer.end(TraceKind::kDx, t.chunk, t.expert, trace_index(t, first_row_));
        store_rows<4>(d, &p.dx_store, buffer_, t.column, t.pool_row + warp_row_, lane());
        signal_.defer(p.counters + p.dx_done + (t.slot + first_row_) / layout::kRowBlock, nullptr, lane());
        tracer.end(TraceKind::kStoreDx, t.chunk, t.expert, trace_index(t, first_row_));
    }

    __device__ __forceinline__ void gradient(const BackwardTile& t, Tracer<C::kTrace>& tracer) {
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        multiply<Major::kMn, Major::kMn>(d, t.k_blocks, t.rows > 0);
        store_gradient_tile(p, t, d, signal_, first_row_, warp_row_, buffer_,
                            static_cast<int>(ptx::lane_id_anew()), tracer);
    }

    const layout::BackwardParams& p;
    const Smem<C>& shared;
    int first_row_;  // of the tile: the warpgroup's rows
    int warp_row_;   // the warp's
    std::uint32_t buffer_;
    RingCursor<C::kStages> stage_;
    DeferredSignal signal_;
};

}  // namespace mega_moe::device::sm90
