#pragma once
#include <cstdint>

#include "device/ptx/fence.cuh"
#include "device/ptx/tma.cuh"
#include "device/schedule/backward_tile.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/stages_fp8.cuh"
#include "layout/scale_runs.h"

namespace mega_moe::device::sm90 {

// One thread: fills the stages with the operands of this CTA's tiles. Each of a cluster's CTAs loads half of
// what both read: of the weights, or of a tail's rows, or of the columns of a gradient.
template <class C>
class BackwardLoader {
  public:
    __device__ __forceinline__ BackwardLoader(const layout::BackwardParams& params, const Smem<C>& map,
                                              int cta)
        : p(params), shared(map), cta_(cta) {}

    __device__ __forceinline__ void run(Tracer<C::kTrace>& tracer) {
        RingCursor<C::kRing> ring;
        tracer.start();
        for (;; ring.next()) {
            const BackwardTile t = await_record<BackwardTile>(shared, ring);
            ptx::mbarrier_arrive(shared.ring_empty(ring.at));
            if (t.kind == kEnd) return;
            // Orders the copies after the signals that the scheduler has seen.
            ptx::fence_proxy_async_global();
            tracer.end(wait_kind(t.kind), t.chunk, t.expert, trace_index(t, 0));
            if (t.kind == kDzTile) {
                const bool recomputes = !C::kSavesGateUp || (t.flags & kSaved) == 0;
                if constexpr (C::kFp8) {
                    if (recomputes) load_quantized(t, gate_up_operands(t));
                    load_quantized(t, dh_operands(t));
                } else {
                    if (recomputes) load_gate_up(t);
                    load_da(t);
                }
            } else if (t.kind == kDxTile) {
                if constexpr (C::kFp8)
                    load_quantized(t, dx_operands(t));
                else
                    load_dx(t);
            } else if constexpr (C::kFp8Wgrad) {
                if (t.kind == kTransposeTile)
                    load_to_transpose(t);
                else
                    load_quantized_gradient(t);
            } else if (t.kind == kGateUpGradient) {
                load_gradient(t, &p.dz_blocks, &p.x_blocks);
            } else {
                load_gradient(t, &p.dy_blocks, &p.h_blocks);
            }
            tracer.end(load_kind(t.kind), t.chunk, t.expert, trace_index(t, 0));
        }
    }

  private:
    static constexpr std::uint16_t kBoth = 3;
    static constexpr int kBlockBytes = 64 * kOperandRowBytes;  // 64 rows of 64 columns

    static __device__ __forceinline__ TraceKind wait_kind(int kind) {
        return kind == kDzTile   ? TraceKind::kWaitDz
               : kind == kDxTile ? TraceKind::kWaitDx
                                 : TraceKind::kWaitGradient;
    }
    static __device__ __forceinline__ TraceKind load_kind(int kind) {
        return kind == kDzTile   ? TraceKind::kLoadDz
               : kind == kDxTile ? TraceKind::kLoadDx
                                 : TraceKind::kLoadGradient;
    }

    // The next stage, once both CTAs have released it.
    __device__ __forceinline__ std::uint32_t open_stage(int bytes) {
        const std::uint32_t full = shared.full(stage_.at);
        ptx::mbarrier_wait(shared.empty(stage_.at), stage_.parity ^ 1);
        ptx::mbarrier_arrive_expect(full, static_cast<std::uint32_t>(bytes));
        return full;
    }
    // 128 rows of one of the pools x 64 columns from k on. In a tail both CTAs load half, whether or not they
    // have a block of columns.
    __device__ __forceinline__ void load_rows(const BackwardTile& t, const layout::TensorMap* rows,
                                              const layout::TensorMap* half, std::uint32_t full, int k) {
        if (t.tail == 0)
            ptx::tma_load(shared.a(stage_.at), rows, full, k, t.pool_row);
        else
            ptx::tma_multicast(shared.a(stage_.at) + cta_ * (C::kBytesA / 2), half, full, kBoth, k,
                               t.pool_row + cta_ * (layout::kTileRows / 2));
    }
    static __device__ __forceinline__ bool has_columns(const BackwardTile& t) {
        return t.tail == 0 || t.rows > 0;
    }

    // x [128, 64] and [128 gate | 128 up] of w_gate_up, K-major both.
    __device__ __forceinline__ void load_gate_up(const BackwardTile& t) {
        const std::uint32_t columns = C::kBytesB / 2;
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(has_columns(t) ? C::kStageBytes : C::kBytesA);
            const std::uint32_t b = shared.b(stage_.at);
            const int k = k_block * C::kBlockK;
            load_rows(t, &p.x_load, &p.x_half_load, full, k);
            if (t.tail == 0) {
                ptx::tma_multicast(b + cta_ * columns, &p.gate_up_load, full, kBoth, k,
                                   cta_ == 0 ? t.weight_row : t.weight_row_2);
            } else if (has_columns(t)) {
                ptx::tma_load(b, &p.gate_up_load, full, k, t.weight_row);
                ptx::tma_load(b + columns, &p.gate_up_load, full, k, t.weight_row_2);
            }
        }
    }
    // dy [128, 64], K-major, and 128 columns of w_down, MN-major: two blocks.
    __device__ __forceinline__ void load_da(const BackwardTile& t) {
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(C::kBytesA + (has_columns(t) ? 2 * kBlockBytes : 0));
            const std::uint32_t b = shared.b(stage_.at);
            const int k = k_block * C::kBlockK;
            load_rows(t, &p.dy_load, &p.dy_half_load, full, k);
            if (t.tail == 0) {
                ptx::tma_multicast(b + cta_ * kBlockBytes, &p.down_load, full, kBoth, t.column + cta_ * 64,
                                   t.down_row + k);
            } else if (has_columns(t)) {
                ptx::tma_load(b, &p.down_load, full, t.column, t.down_row + k);
                ptx::tma_load(b + kBlockBytes, &p.down_load, full, t.column + 64, t.down_row + k);
            }
        }
    }
    // dz [128, 64], K-major, and 256 columns of w_gate_up, MN-major: four blocks.
    __device__ __forceinline__ void load_dx(const BackwardTile& t) {
        const std::uint32_t columns = C::kBytesB / 2;
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(has_columns(t) ? C::kStageBytes : C::kBytesA);
            const std::uint32_t b = shared.b(stage_.at);
            const int k = k_block * C::kBlockK;
            load_rows(t, &p.dz_load, &p.dz_half_load, full, k);
            const int block = t.column / 64;
            if (t.tail == 0) {
                ptx::tma_multicast(b + cta_ * columns, &p.gate_up_blocks, full, kBoth, 0, t.weight_row + k,
                                   block + 2 * cta_);
            } else if (has_columns(t)) {
                ptx::tma_load(b, &p.gate_up_blocks, full, 0, t.weight_row + k, block);
                ptx::tma_load(b + columns, &p.gate_up_blocks, full, 0, t.weight_row + k, block + 2);
            }
        }
    }
    // Operands of a GEMM in e4m3, all K-major.
    struct Quantized {
        const layout::TensorMap* rows;
        const layout::TensorMap* half_rows;
        const layout::TensorMap* columns;
        const std::byte* row_scales;  // of the tile's rows, run by run
        const float* scales[2];       // of the first and of the second columns, of the first k-block
        int scale_step;
        int column_rows[2];  // of `columns`: where they begin
        int column_bytes;    // of either
    };
    // Scale factors of the tile's rows in a pool whose rows have so many.
    static __device__ __forceinline__ const std::byte* runs(const std::byte* scales, const BackwardTile& t,
                                                            int groups) {
        return scales + layout::scale_run(t.pool_row, 0, groups) * layout::kRowScaleBytes;
    }
    // x and [128 gate | 128 up] of w_gate_up.
    __device__ __forceinline__ Quantized gate_up_operands(const BackwardTile& t) const {
        const int groups = p.hidden / layout::kQuantGroup;
        const float* scales = p.gate_up_scales;
        return {&p.x_load,
                &p.x_half_load,
                &p.gate_up_load,
                runs(p.x_scales, t, groups),
                {scales + std::int64_t{t.weight_row} / layout::kQuantGroup * groups,
                 scales + std::int64_t{t.weight_row_2} / layout::kQuantGroup * groups},
                1,
                {t.weight_row, t.weight_row_2},
                C::kBytesB / 2};
    }
    // dy and 128 rows of w_down's transposed copy.
    __device__ __forceinline__ Quantized dh_operands(const BackwardTile& t) const {
        const int groups = p.hidden / layout::kQuantGroup;
        const int step = p.intermediate / layout::kQuantGroup;
        const float* scales =
            p.down_scales + std::int64_t{t.expert} * groups * step + t.column / layout::kQuantGroup;
        const int row = t.expert * p.intermediate + t.column;
        return {
            &p.dy_load, &p.dy_half_load, &p.down_load,         runs(p.dy_scales, t, groups), {scales, scales},
            step,       {row, row + 64}, 64 * kOperandRowBytes};
    }
    // dz and 256 rows of w_gate_up's transposed copy.
    __device__ __forceinline__ Quantized dx_operands(const BackwardTile& t) const {
        const int groups = 2 * p.intermediate / layout::kQuantGroup;
        const int step = p.hidden / layout::kQuantGroup;
        const float* scales =
            p.gate_up_scales + std::int64_t{t.expert} * groups * step + t.column / layout::kQuantGroup;
        const int row = t.expert * p.hidden + t.column;
        return {&p.dz_load,           &p.dz_half_load,
                &p.gate_up_blocks,    runs(p.dz_scales, t, groups),
                {scales, scales + 1}, step,
                {row, row + 128},     C::kBytesB / 2};
    }
    __device__ __forceinline__ void load_quantized(const BackwardTile& t, Quantized o) {
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const int columns = has_columns(t) ? 2 * o.column_bytes : 0;
            const std::uint32_t full = open_stage(C::kBytesA + layout::kRowScaleBytes + columns);
            const std::uint32_t b = shared.b(stage_.at);
            const int k = k_block * C::kBlockK;
            load_column_scales(shared, stage_.at, o.scales[0], o.scales[1]);
            o.scales[0] += o.scale_step;
            o.scales[1] += o.scale_step;
            ptx::bulk_load(shared.row_scales(stage_.at), o.row_scales, layout::kRowScaleBytes, full);
            o.row_scales += layout::kRowScaleBytes;
            load_rows(t, o.rows, o.half_rows, full, k);
            if (t.tail == 0) {
                ptx::tma_multicast(b + cta_ * o.column_bytes, o.columns, full, kBoth, k,
                                   cta_ == 0 ? o.column_rows[0] : o.column_rows[1]);
            } else if (has_columns(t)) {
                ptx::tma_load(b, o.columns, full, k, o.column_rows[0]);
                ptx::tma_load(b + o.column_bytes, o.columns, full, k, o.column_rows[1]);
            }
        }
    }
    // 64 rows of the pools: 128 columns that become rows of the gradient, and 256 that become its columns.
    __device__ __forceinline__ void load_gradient(const BackwardTile& t, const layout::TensorMap* rows,
                                                  const layout::TensorMap* columns) {
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(t.rows > 0 ? C::kStageBytes : 0);
            // wgrad in bf16 has no scale factors, whose copy would arrive here.
            if constexpr (C::kFp8) ptx::mbarrier_arrive(full);
            if (t.rows == 0) continue;
            const int pool_row = t.pool_row + k_block * layout::kRowBlock;
            ptx::tma_load(shared.a(stage_.at), rows, full, 0, pool_row, t.row / 64);
            ptx::tma_multicast(shared.b(stage_.at) + cta_ * (C::kBytesB / 2), columns, full, kBoth, 0,
                               pool_row, t.column / 64 + 2 * cta_);
        }
    }

    // 128 rows of x or dy in bf16, 128 columns at once: 64 rows after 64.
    __device__ __forceinline__ void load_to_transpose(const BackwardTile& t) {
        constexpr int kBoxBytes = 2 * kBlockBytes;
        const layout::TensorMap* rows = t.row == 0 ? &p.x_blocks : &p.dy_blocks;
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(t.rows > 0 ? 2 * kBoxBytes : 0);
            ptx::mbarrier_arrive(full);
            if (t.rows == 0) continue;
            const int block = t.column / 64 + 2 * k_block;
            ptx::tma_load(shared.b(stage_.at), rows, full, 0, t.pool_row, block);
            ptx::tma_load(shared.b(stage_.at) + kBoxBytes, rows, full, 0, t.pool_row + layout::kRowBlock,
                          block);
        }
    }
    // 128 rows of the pools, of which 128 columns become rows of the gradient, and 256 become its columns.
    __device__ __forceinline__ void load_quantized_gradient(const BackwardTile& t) {
        const bool gate_up = t.kind == kGateUpGradient;
        const int a_columns = gate_up ? 2 * p.intermediate : p.hidden;
        const int b_columns = gate_up ? p.hidden : p.intermediate;
        const std::byte* a =
            (gate_up ? p.dz_pool : p.dy_transposed) + layout::transposed_block(t.pool_row, t.row, a_columns);
        const int b_column = t.column + cta_ * layout::kTransposedEdge;
        const std::byte* b =
            (gate_up ? p.x_transposed : p.h_pool) + layout::transposed_block(t.pool_row, b_column, b_columns);
        const layout::GradientScales at{p.hidden, p.intermediate};
        const float* scales =
            p.gradient_scales + std::int64_t{t.pool_row / layout::kTransposedEdge} * at.length();
        const int a_scales = (gate_up ? at.dz() : at.dy()) + t.row;
        const int b_scales = (gate_up ? at.x() : at.h()) +
                             layout::GradientScales::of_block(t.column / layout::kTransposedEdge);
        // The last columns of w_down may be half a tile.
        const int halves = t.column + layout::kTransposedEdge < b_columns ? 2 : 1;
        const int bytes =
            (1 + halves) * layout::kTransposedBytes + layout::kRowScaleBytes + kColumnScaleBytes;
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage_.next()) {
            const std::uint32_t full = open_stage(t.rows > 0 ? bytes : 0);
            ptx::mbarrier_arrive(full);
            if (t.rows == 0) continue;
            ptx::bulk_load(shared.row_scales(stage_.at), scales + a_scales, layout::kRowScaleBytes, full);
            ptx::bulk_load(shared.column_scales(stage_.at), scales + b_scales, kColumnScaleBytes, full);
            ptx::bulk_load(shared.a(stage_.at), a, layout::kTransposedBytes, full);
            if (cta_ < halves)
                ptx::bulk_multicast(shared.b(stage_.at) + cta_ * layout::kTransposedBytes, b,
                                    layout::kTransposedBytes, full, kBoth);
            scales += at.length();
            a += a_columns * layout::kTransposedEdge;
            b += b_columns * layout::kTransposedEdge;
        }
    }

    const layout::BackwardParams& p;
    const Smem<C>& shared;
    int cta_;
    RingCursor<C::kStages> stage_;
};

}  // namespace mega_moe::device::sm90
