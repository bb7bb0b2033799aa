#pragma once
#include <cstdint>

#include "device/common/trace.cuh"
#include "device/common/two_nans.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/ldmatrix.cuh"
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

// One warp's 16 rows x 32 columns of fp32 as whole lines, through its buffer, which no copy may still read.
// `put(address, v)` stores or adds 16 bytes; `first` is where the first row begins.
template <class Put>
__device__ __forceinline__ void put_floats(const float* d, std::byte* first, std::int64_t row_bytes,
                                           std::uint32_t buffer, int lane, const Put& put) {
    // Of a row's 16-byte chunks: the half of a warp that stores at once meets each bank once.
    const auto chunk_at = [&](int row, int chunk) {
        return buffer + row * 128 + ((chunk ^ (row % 4 * 2 + row / 4 % 2)) << 4);
    };
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ptx::store_shared(chunk_at(lane / 4 + 8 * half, 2 * i + lane % 4 / 2) + lane % 2 * 8,
                              float2{d[4 * i + 2 * half], d[4 * i + 2 * half + 1]});
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 4 * i + lane / 8;
        put(first + row * row_bytes + lane % 8 * 16, ptx::load_shared_vector(chunk_at(row, lane % 8)));
    }
}

// One warp's 16 rows x 64 `Blocks` columns are added to bf16 in memory, with one rounding. Whole lines,
// through its buffer.
template <int Blocks>
__device__ __forceinline__ void add_rows(float* d, std::byte* first, std::int64_t row_bytes,
                                         std::uint32_t buffer, int lane) {
    uint4 old[4];
    const auto load = [&](int block) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            old[i] = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(
                first + (4 * i + lane / 8) * row_bytes + block * 128 + lane % 8 * 16));
    };
    load(0);
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * i + lane / 8;
            ptx::store_shared(buffer + row * 128 + ((lane % 8 ^ row % 8) << 4), old[i]);
        }
        if (block + 1 < Blocks) load(block + 1);
        __syncwarp();
        // As stage_block lays it out.
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            std::uint32_t words[4];
            ptx::ldmatrix_x4(buffer + lane % 16 * 128 + ((i + lane / 16) ^ (lane % 8)) * 16, words);
            float* e = d + 32 * block + 4 * i;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                e[2 * j] += ptx::low_bf16(words[j]);
                e[2 * j + 1] += ptx::high_bf16(words[j]);
            }
        }
        store_block_directly([&] { stage_block(d + 32 * block, buffer, lane); }, first + block * 128,
                             row_bytes, buffer, lane);
    }
}

// By one warp, ahead of the tile's GEMM: the old values of an fp32 result that store_gradient will add to,
// into L2. Pays where the GEMM is short, in e4m3.
__device__ __forceinline__ void prefetch_gradient(const layout::BackwardParams& p, const BackwardTile& t,
                                                  int warp_row, int lane) {
    if (!p.accumulate || !p.gradients_are_fp32) return;
    const layout::GradientTarget& g = t.kind == kDownGradient ? p.dw_down : p.dw_gate_up;
    const int row_bytes = min(256, g.columns - t.column) * 4;
    const std::int64_t row = std::int64_t{t.expert} * g.rows + t.row + warp_row;
    const std::byte* first = g.out + (row * g.columns + t.column) * 4;
    for (int at = lane * 128; at < 16 * row_bytes; at += 32 * 128)
        ptx::prefetch_line(first + at / row_bytes * (std::int64_t{g.columns} * 4) + at % row_bytes);
}

// By one warp, whose rows of the tile start at `warp_row`.
__device__ __forceinline__ void store_gradient(const layout::BackwardParams& p, const BackwardTile& t,
                                               float (&d)[128], int warp_row, std::uint32_t buffer,
                                               int lane) {
    const bool down = t.kind == kDownGradient;
    const layout::GradientTarget& g = down ? p.dw_down : p.dw_gate_up;
    const bool both_halves = t.column + 128 < g.columns;
    if (lane == 0) ptx::bulk_wait_read<0>();
    if ((t.flags & kAllNan) != 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = __uint_as_float(kTwoNans);
    }
    // Where the warp's first element lies in the expert's matrix.
    const std::int64_t at = std::int64_t{t.row + warp_row} * g.columns + t.column;
    const std::int64_t row_bytes = std::int64_t{g.columns} * 4;
    const std::int64_t out_at = std::int64_t{t.expert} * g.rows * g.columns + at;
    float* partial = g.partials + t.partial * p.partial_stride + at;
    const bool goes_on = (t.flags & kToPartials) != 0;
    const bool went_before = (t.flags & kFromPartials) != 0;
    if (p.gradients_are_fp32 || goes_on) {
        // An fp32 result accumulates in place between parts.
        auto* to = reinterpret_cast<std::byte*>(
            p.gradients_are_fp32 ? reinterpret_cast<float*>(g.out) + out_at : partial);
        const auto put_all = [&](const auto& put) {
#pragma unroll
            for (int block = 0; block < 8; ++block)
                if (block < 4 || both_halves)
                    put_floats(d + 16 * block, to + block * 128, row_bytes, buffer, lane, put);
        };
        if (went_before || (p.gradients_are_fp32 && p.accumulate))
            put_all([](std::byte* at, uint4 v) { ptx::add_relaxed_gpu(at, v); });
        else
            put_all([](std::byte* at, uint4 v) { ptx::store(at, v); });
        return;
    }
    if (went_before) {
        const float* own = partial + std::int64_t{lane / 4} * g.columns + lane % 4 * 2;
        for_pairs(d, both_halves, [&](int row, int column, float& a, float& b) {
            const float2 before = ptx::load_relaxed_gpu(
                reinterpret_cast<const float2*>(own + row * 8 * std::int64_t{g.columns} + column));
            a += before.x;
            b += before.y;
        });
    }
    if (p.accumulate) {
        std::byte* to = g.out + out_at * 2;
        if (both_halves)
            add_rows<4>(d, to, row_bytes / 2, buffer, lane);
        else
            add_rows<2>(d, to, row_bytes / 2, buffer, lane);
        return;
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
