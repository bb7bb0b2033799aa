#pragma once
#include <cstdint>

#include "device/common/trace.cuh"
#include "device/common/two_nans.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/schedule/backward_tile.cuh"
#include "device/sm90/epilogue/store_rows.cuh"

// A tile of a weight's gradient, in bf16 in every precision. Its epilogue goes into the sums between parts,
// or into the result in its own dtype, which is set or added to. Each element has one thread in each part,
// and the parts are added in order, so that every sum has one order.
namespace mega_moe::device::sm90 {

// A thread's elements of a tile, wgmma's order: rows lane / 4 and + 8 of the warp's, columns 8 i + 2 (lane %
// 4) and
// + 1. `at(i, columns)` is called with pairs of them.
template <class Pair>
__device__ __forceinline__ void for_pairs(float (&d)[128], bool both_halves, const Pair& pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == 1 && !both_halves) return;
#pragma unroll
        for (int i = 16 * half; i < 16 * half + 16; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row)
                pair(row, 8 * i, d[4 * i + 2 * row], d[4 * i + 2 * row + 1]);
    }
}

// By one warp, whose rows of the tile start at `warp_row`.
__device__ __forceinline__ void store_gradient(const layout::BackwardParams& p, const BackwardTile& t,
                                               float (&d)[128], int warp_row, std::uint32_t buffer,
                                               int lane) {
    const bool down = t.kind == kDownGradient;
    const layout::GradientTarget& g = down ? p.dw_down : p.dw_gate_up;
    const bool both_halves = t.column + 128 < g.columns;
    if ((t.flags & kAllNan) != 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = __uint_as_float(kTwoNans);
    }
    // Where the thread's first pair lies in the expert's matrix.
    const std::int64_t at = std::int64_t{t.row + warp_row + lane / 4} * g.columns + t.column + lane % 4 * 2;
    const std::int64_t eight_rows = std::int64_t{g.columns} * 8;
    const std::int64_t out_at = std::int64_t{t.expert} * g.rows * g.columns + at;
    float* partial = g.partials + t.partial * p.partial_stride + at;
    const bool goes_on = (t.flags & kToPartials) != 0;
    const bool went_before = (t.flags & kFromPartials) != 0;
    if (p.gradients_are_fp32 || goes_on) {
        // An fp32 result accumulates in place between parts.
        float* to = p.gradients_are_fp32 ? reinterpret_cast<float*>(g.out) + out_at : partial;
        if (went_before || (p.gradients_are_fp32 && p.accumulate)) {
            for_pairs(d, both_halves, [&](int row, int column, float& a, float& b) {
                ptx::add_relaxed_gpu(to + row * eight_rows + column, a, b);
            });
        } else {
            for_pairs(d, both_halves, [&](int row, int column, float& a, float& b) {
                ptx::store(to + row * eight_rows + column, a, b);
            });
        }
        return;
    }
    if (went_before) {
        for_pairs(d, both_halves, [&](int row, int column, float& a, float& b) {
            const float2 before =
                ptx::load_relaxed_gpu(reinterpret_cast<const float2*>(partial + row * eight_rows + column));
            a += before.x;
            b += before.y;
        });
    }
    if (p.accumulate) {
        const auto* out = reinterpret_cast<const std::uint16_t*>(g.out) + out_at;
        for_pairs(d, both_halves, [&](int row, int column, float& a, float& b) {
            const std::uint32_t before = ptx::load_relaxed_gpu(
                reinterpret_cast<const std::uint32_t*>(out + row * eight_rows + column));
            a += ptx::low_bf16(before);
            b += ptx::high_bf16(before);
        });
    }
    const layout::TensorMap* map = down ? &p.dw_down_store : &p.dw_gate_up_store;
    const int row = t.expert * g.rows + t.row + warp_row;
    store_rows<2>(d, map, buffer, t.column, row, lane);
    if (both_halves) store_rows<2>(d + 64, map, buffer, t.column + 128, row, lane);
}

// By one warp, after its MMAs; `signal` counts them.
template <bool Trace, class Signal>
__device__ __forceinline__ void store_gradient_tile(const layout::BackwardParams& p, const BackwardTile& t,
                                                    float (&d)[128], Signal& signal, int first_row,
                                                    int warp_row, std::uint32_t buffer, int lane,
                                                    Tracer<Trace>& tracer) {
    tracer.end(TraceKind::kGradient, t.chunk, t.expert, trace_index(t, first_row));
    store_gradient(p, t, d, warp_row, buffer, lane);
    __syncwarp();
    // Deferred although the next part of the tile may wait for it: another tile is taken meanwhile.
    signal.defer((t.flags & kCountPart) != 0 ? p.counters + p.parts + t.part : nullptr,
                 (t.flags & kCountChunk) != 0 ? p.counters + p.gradients_done + t.chunk : nullptr, lane);
    tracer.end(TraceKind::kStoreGradient, t.chunk, t.expert, trace_index(t, first_row));
}

}  // namespace mega_moe::device::sm90
