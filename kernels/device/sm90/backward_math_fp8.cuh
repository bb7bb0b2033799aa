#pragma once
#include <cstdint>

#include "device/schedule/backward_tile.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/epilogue/activate.cuh"
#include "device/sm90/epilogue/quantize_rows.cuh"
#include "device/sm90/epilogue/saved_gate_up.cuh"
#include "device/sm90/epilogue/store_rows.cuh"
#include "device/sm90/stages_fp8.cuh"
#include "device/sm90/wgrad_operands.cuh"
#include "device/sm90/wgrad_store.cuh"
#include "layout/scale_runs.h"

namespace mega_moe::device::sm90 {

// One warpgroup: its part of this CTA's tiles, of which dz and dx are e4m3 GEMMs and the weights'
// gradients of bf16 or of e4m3.
template <class C>
class Fp8BackwardMath {
  public:
    __device__ __forceinline__ Fp8BackwardMath(const layout::BackwardParams& params, const Smem<C>& map)
        : p(params),
          shared(map),
          math_warp_(static_cast<int>(ptx::from_lane(ptx::thread_id() / 32, 0)) - 4),
          signal_(params.counters) {}

    __device__ __forceinline__ void run(Tracer<C::kTrace>& tracer) {
        tracer.start();
        for (;; ring_.next()) {
            signal_.wait(shared.ring_full(ring_.at), ring_.parity, lane());
            const int kind = record().kind;
            if (kind == kEnd) break;
            if (kind == kDzTile)
                dz_tile(tracer);
            else if (kind == kDxTile)
                dx_tile(tracer);
            else if constexpr (!C::kFp8Wgrad)
                gradient(tracer);
            else if (kind == kTransposeTile)
                transpose_tile(tracer);
            else
                quantized_gradient(tracer);
        }
        signal_.publish(lane());
        // Stores that are not yet signaled still read this CTA's shared memory.
        ptx::bulk_wait<0>();
    }

  private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::lane_id()); }
    // First row of the warpgroup, and of the warp, in the tile.
    __device__ __forceinline__ int first_row() const { return math_warp_ / 4 * layout::kRowBlock; }
    __device__ __forceinline__ int warp_row() const { return math_warp_ * 16; }

    // The warp's current tile stays in shared memory: the accumulators leave no registers for it.
    __device__ __forceinline__ const BackwardTile& record() const {
        return *reinterpret_cast<const BackwardTile*>(shared.record(ring_.at));
    }
    __device__ __forceinline__ BackwardTile take_record() const {
        const BackwardTile t = record();
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(shared.ring_empty(ring_.at));
        return t;
    }
    __device__ __forceinline__ void trace_end(TraceKind kind, const BackwardTile& t,
                                              Tracer<C::kTrace>& tracer) const {
        tracer.end(kind, t.chunk, t.expert, trace_index(t, first_row()));
    }
    // For a trace: the GEMM of a tile begins when its first stage is there.
    __device__ __forceinline__ void trace_wait(Tracer<C::kTrace>& tracer) {
        if constexpr (C::kTrace) {
            signal_.wait(shared.full(stage_.at), stage_.parity, lane());
            trace_end(TraceKind::kWaitTile, record(), tracer);
        }
    }

    template <class Stored = SwizzledRows, int Columns>
    __device__ __forceinline__ void multiply(float (&sums)[Columns], int k_blocks) {
#pragma unroll
        for (int i = 0; i < Columns; ++i)
            sums[i] = 0.0f;
        signal_.wait(shared.full(stage_.at), stage_.parity, lane());
        multiply_quantized<Stored>(sums, shared, stage_, k_blocks, signal_, RowScalesOfStage<C>{shared},
                                   math_warp_, lane());
    }
    // A warpgroup without rows passes the stages on.
    __device__ __forceinline__ BackwardTile pass(int products) {
        const BackwardTile t = take_record();
        pass_tile<C>(shared, stage_, products * t.k_blocks, signal_, lane());
        return t;
    }

    // The routing weights of the warp's rows, 0 beyond the last, until the GEMMs are done: to load them
    // behind these takes half a microsecond.
    __device__ __forceinline__ void keep_weights() {
        const BackwardTile& t = record();
        float weight = 0.0f;
        if (lane() < 16 && warp_row() + lane() < t.rows)
            weight = __uint_as_float(static_cast<std::uint32_t>(
                ptx::load_relaxed_gpu(p.route.slots + t.slot + warp_row() + lane()) >> 32));
        signal_.wait(shared.full(stage_.at), stage_.parity, lane());
        if constexpr (C::kFp8Wgrad) {
            // They go into a buffer that a copy may still read.
            if (lane() == 0) ptx::bulk_wait_read<0>();
            __syncwarp();
        }
        if (lane() < 16) ptx::store_shared(shared.store_scales(math_warp_) + lane() * 4, weight);
        __syncwarp();
    }

    // Gate and up, recomputed or as the forward saved them, the gradient of h, and from these in registers
    // dz, h and a part of dtopk.
    __device__ __forceinline__ void dz_tile(Tracer<C::kTrace>& tracer) {
        const bool saved = C::kSavesGateUp && (record().flags & kSaved) != 0;
        if (record().rows <= first_row()) {
            const BackwardTile t = pass(saved ? 1 : 2);
            if constexpr (C::kFp8Wgrad) {
                // All 128 rows of a block, since wgrad reads them all.
                if (t.rows == 0) return;
                GradientOperands<C>(p, shared, t, math_warp_, C::kMathWarps).store_zeros(t.column);
                signal_.defer(dz_done(t), nullptr, lane());
            }
            return;
        }
        keep_weights();
        trace_wait(tracer);
        std::uint32_t gate[32], up[32];
        if (saved) {
            load_saved(gate, up);
        } else {
            float z[128];
            multiply(z, record().k_blocks);
            // Rounded as the forward does, and half the registers.
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                gate[i] = ptx::convert_bf16x2(z[2 * i], z[2 * i + 1]);
                up[i] = ptx::convert_bf16x2(z[64 + 2 * i], z[64 + 2 * i + 1]);
            }
        }
        float dh[64];
        multiply(dh, record().k_blocks);
        const BackwardTile t = take_record();
        trace_end(TraceKind::kDz, t, tracer);
        signal_.publish(lane());
        if constexpr (C::kFp8Wgrad)
            store_quantized_dz(t, gate, up, dh);
        else
            store_dz(t, gate, up, dh);
        signal_.defer(dz_done(t), nullptr, lane());
        trace_end(TraceKind::kStoreDz, t, tracer);
    }

    // Beyond the last row lies what the forward made of its padding: zeros for wgrad in e4m3, which reads all
    // rows; with wgrad in bf16 the epilogue masks what it stores.
    __device__ __forceinline__ void load_saved(std::uint32_t (&gate)[32], std::uint32_t (&up)[32]) const {
        const BackwardTile& t = record();
        load_gate_up(p.saved.memory +
                         layout::saved_offset(t.slot + first_row(), t.column / layout::kSavedColumns,
                                              p.intermediate / layout::kSavedColumns, math_warp_ % 4, lane()),
                     gate, up);
        if constexpr (C::kFp8Wgrad) {
            const int last = t.rows - warp_row() - lane() / 4;
            const std::uint32_t mask[2] = {last > 0 ? 0xFFFFFFFFu : 0, last > 8 ? 0xFFFFFFFFu : 0};
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                gate[i] &= mask[i % 2];
                up[i] &= mask[i % 2];
            }
        }
    }

    __device__ __forceinline__ std::uint32_t* dz_done(const BackwardTile& t) const {
        return p.counters + p.dz_done + (t.slot + first_row()) / layout::kRowBlock;
    }

    __device__ __forceinline__ void store_dz(const BackwardTile& t, const std::uint32_t (&gate)[32],
                                             const std::uint32_t (&up)[32], float (&dh)[64]) {
        const int lane = static_cast<int>(ptx::lane_id_anew());
        // Wait for the copy that last read the buffer.
        if (lane == 0) ptx::bulk_wait_read<0>();
        float weight[2];
        std::uint32_t mask[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp_row() + lane / 4 + 8 * i;
            mask[i] = row < t.rows ? 0xFFFFFFFFu : 0;
            weight[i] = ptx::load_shared(shared.store_scales(math_warp_) + (lane / 4 + 8 * i) * 4);
        }
        const int row = t.pool_row + warp_row();
        float dw[2] = {};
        float du[64];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            std::uint32_t words[16];
            float* dg_block = dh + 32 * block;
            float* du_block = du + 32 * block;
            with_activation(p.activation, [&](const auto& act) {
                activation_backward_fp32(act, gate + 16 * block, up + 16 * block, words, dg_block, du_block,
                                         weight, mask, dw);
            });
            const int column = t.column + block * 64;
            store_words(words, p.h_pool, p.intermediate, column, row);
            round_block(words, dg_block, mask);
            store_words(words, p.dz_pool, 2 * p.intermediate, column, row);
            round_block(words, du_block, mask);
            store_words(words, p.dz_pool, 2 * p.intermediate, p.intermediate + column, row);
        }
        store_dtopk(t, dw, row, lane);
        if (p.needs_dx) store_codes(dh, du, t, row);
    }
    // Without bf16: codes of 128 rows for wgrad, and of each row for dx. Padding rows of x and dy are zeros,
    // so these are zero too.
    __device__ __forceinline__ void store_quantized_dz(const BackwardTile& t, const std::uint32_t (&gate)[32],
                                                       const std::uint32_t (&up)[32], float (&dh)[64]) {
        const int lane = static_cast<int>(ptx::lane_id_anew());
        // Wait for the copy that last read the buffer.
        if (lane == 0) ptx::bulk_wait_read<0>();
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            weight[i] = ptx::load_shared(shared.store_scales(math_warp_) + (lane / 4 + 8 * i) * 4);
        __syncwarp();
        constexpr std::uint32_t kAll[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
        float dw[2] = {};
        float du[64];
        std::uint32_t h[32];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            with_activation(p.activation, [&](const auto& act) {
                activation_backward_fp32(act, gate + 16 * block, up + 16 * block, h + 16 * block,
                                         dh + 32 * block, du + 32 * block, weight, kAll, dw);
            });
        }
        const int row = t.pool_row + warp_row();
        store_dtopk(t, dw, row, lane);
        const int warps = t.rows > layout::kRowBlock ? C::kMathWarps : C::kMathWarps / 2;
        GradientOperands<C>(p, shared, t, math_warp_, warps).store_dz(dh, du, h, t.column);
        if (p.needs_dx) store_codes(dh, du, t, row);
    }
    __device__ __forceinline__ void store_dtopk(const BackwardTile& t, float (&dw)[2], int row, int lane) {
        if (!p.needs_dtopk) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            dw[i] += __shfl_xor_sync(ptx::kAllLanes, dw[i], 1);
            dw[i] += __shfl_xor_sync(ptx::kAllLanes, dw[i], 2);
            const std::int64_t part_row = row + lane / 4 + 8 * i;
            if (lane % 4 == 0)
                ptx::store(p.dtopk_parts + part_row * (p.intermediate / layout::kDtopkColumns) +
                               t.column / layout::kDtopkColumns,
                           dw[i]);
        }
    }
    static __device__ __forceinline__ void round_block(std::uint32_t (&words)[16], const float* d,
                                                       const std::uint32_t (&mask)[2]) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            words[i] = ptx::convert_bf16x2(d[2 * i], d[2 * i + 1]) & mask[i % 2];
    }
    __device__ __forceinline__ void store_words(const std::uint32_t* words, std::byte* pool, int columns,
                                                int column, int row) {
        const int lane = static_cast<int>(ptx::lane_id_anew());
        const std::int64_t row_bytes = std::int64_t{columns} * 2;
        const std::uint32_t buffer = shared.store_buffer(math_warp_);
        store_block_directly([&] { stage_words(words, buffer, lane); }, pool + row * row_bytes + column * 2,
                             row_bytes, buffer, lane);
    }
    // Quantized straight from fp32. Padding rows are garbage; they reach only padding rows of dx.
    __device__ __forceinline__ void store_codes(float (&dg)[64], float (&du)[64], const BackwardTile& t,
                                                int row) {
        const int lane = static_cast<int>(ptx::lane_id_anew());
        const std::int64_t row_bytes = 2 * p.intermediate;
        const std::uint32_t buffer = shared.store_buffer(math_warp_);
        std::byte* first = p.dz_codes + row * row_bytes + t.column;
        float factor[2][2];
        const float scale = factors_of_two_groups(dg, du, factor, p.rounding, lane);
        store_block_directly([&] { stage_codes(dg, factor[0], buffer, lane); }, first, row_bytes, buffer,
                             lane);
        store_block_directly([&] { stage_codes(du, factor[1], buffer, lane); }, first + p.intermediate,
                             row_bytes, buffer, lane);
        const int column = t.column + lane / 2 % 2 * p.intermediate;
        ptx::store(reinterpret_cast<float*>(p.dz_scales) +
                       layout::scale_at(row + lane / 4 + lane % 2 * 8, column / layout::kQuantGroup,
                                        2 * p.intermediate / layout::kQuantGroup),
                   scale);
    }

    __device__ __forceinline__ void dx_tile(Tracer<C::kTrace>& tracer) {
        if (record().rows <= first_row()) {
            pass(1);
            return;
        }
        trace_wait(tracer);
        float d[128];
        multiply(d, record().k_blocks);
        const BackwardTile t = take_record();
        trace_end(TraceKind::kDx, t, tracer);
        signal_.publish(lane());
        const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
        store_rows_directly<4>(d, p.dx_pool + (t.pool_row + warp_row()) * row_bytes + t.column * 2, row_bytes,
                               shared.store_buffer(math_warp_), static_cast<int>(ptx::lane_id_anew()));
        signal_.defer(p.counters + p.dx_done + (t.slot + first_row()) / layout::kRowBlock, nullptr, lane());
        trace_end(TraceKind::kStoreDx, t, tracer);
    }

    __device__ __forceinline__ void gradient(Tracer<C::kTrace>& tracer) {
        trace_wait(tracer);
        const BackwardTile t = take_record();
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        signal_.wait(shared.full(stage_.at), stage_.parity, lane());
        // Promoted accumulators leave ptxas no registers to keep a wgmma in flight around the loop (C7511).
        // Two warpgroups keep the tensor cores as busy.
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            ptx::mbarrier_wait(shared.full(stage_.at), stage_.parity);
            if (t.rows > 0)
                multiply_stage<Major::kMn, Major::kMn>(
                    d, shared.a(stage_.at) + static_cast<std::uint32_t>(first_row() * kOperandRowBytes),
                    shared.b(stage_.at));
            if (k_block >= kPublishBlock) signal_.publish(lane());
            ptx::wgmma_wait<0>();
            release_stage<C>(shared, stage_.at, lane());
        }
        store_gradient_tile(p, t, d, signal_, first_row(), warp_row(), shared.store_buffer(math_warp_),
                            static_cast<int>(ptx::lane_id_anew()), tracer);
    }

    __device__ __forceinline__ void quantized_gradient(Tracer<C::kTrace>& tracer) {
        trace_wait(tracer);
        prefetch_gradient(p, record(), warp_row(), lane());
        float d[128];
        if (record().rows > 0) {
            multiply<TransposedSlabs>(d, record().k_blocks);
        } else {
            pass_tile<C>(shared, stage_, record().k_blocks, signal_, lane());
#pragma unroll
            for (int i = 0; i < 128; ++i)
                d[i] = 0.0f;
        }
        const BackwardTile t = take_record();
        signal_.publish(lane());
        store_gradient_tile(p, t, d, signal_, first_row(), warp_row(), shared.store_buffer(math_warp_),
                            static_cast<int>(ptx::lane_id_anew()), tracer);
    }

    // 128 rows of x or dy in bf16 to their transposed codes.
    __device__ __forceinline__ void transpose_tile(Tracer<C::kTrace>& tracer) {
        trace_wait(tracer);
        const BackwardTile t = take_record();
        if (t.rows == 0) {
            pass_tile<C>(shared, stage_, t.k_blocks, signal_, lane());
            return;
        }
        if (lane() == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
        const GradientOperands<C> to(p, shared, t, math_warp_, C::kMathWarps);
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            signal_.wait(shared.full(stage_.at), stage_.parity, lane());
            std::uint32_t words[32];
            load_slab_words(words, shared.b(stage_.at), math_warp_, t.rows, lane());
            __syncwarp();
            release_stage<C>(shared, stage_.at, lane());
            const int column = t.column + k_block * layout::kTransposedEdge;
            if (t.row == 0)
                to.store_x(words, column, k_block % 2);
            else
                to.store_dy(words, column);
        }
        signal_.defer(p.counters + p.transposed + t.slot / layout::kRowBlock, nullptr, lane());
    }

    const layout::BackwardParams& p;
    const Smem<C>& shared;
    int math_warp_;
    IndexedDeferredSignal<C> signal_;
    RingCursor<C::kStages> stage_;
    RingCursor<C::kRing> ring_;
};

}  // namespace mega_moe::device::sm90
