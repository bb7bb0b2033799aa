#pragma once
#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/tma.cuh"

namespace mega_moe::device::sm90 {

// One warp's 16 rows x 64 columns to bf16, through 2 KB of shared memory in the 128-byte swizzle. `d` are the
// accumulators of those columns: rows lane / 4 and + 8, columns 8 i + 2 (lane % 4) and + 1.
__device__ __forceinline__ void stage_block(const float* d, std::uint32_t buffer, int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int chunk = (i + lane / 16) ^ (row % 8);
        const float* e = d + 4 * i;
        ptx::stmatrix_x4(buffer + row * 128 + chunk * 16, ptx::convert_bf16x2(e[0], e[1]),
                         ptx::convert_bf16x2(e[2], e[3]), ptx::convert_bf16x2(e[4], e[5]),
                         ptx::convert_bf16x2(e[6], e[7]));
    }
}

// One warp's block as stage_block stages it, from values that are bf16 already: `words` hold columns 8 i + 2
// (lane % 4) and + 1, of row lane / 4 in the even ones and of row + 8 in the odd ones.
__device__ __forceinline__ void stage_words(const std::uint32_t* words, std::uint32_t buffer, int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int chunk = (i + lane / 16) ^ (row % 8);
        const std::uint32_t* w = words + 2 * i;
        ptx::stmatrix_x4(buffer + row * 128 + chunk * 16, w[0], w[1], w[2], w[3]);
    }
}

// By one warp, once its buffer is free again: what `stage` leaves there, as the map's box of 16 x 64 at
// (column, row).
template <class Stage>
__device__ __forceinline__ void store_block(const Stage& stage, const void* map, std::uint32_t buffer,
                                            int column, int row, int lane) {
    if (lane == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
    stage();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
        ptx::tma_store(map, buffer, column, row);
        ptx::bulk_commit();
    }
}

// One warp's 16 rows x 64 `Blocks` columns, by the map's boxes of 16 x 64 from (column, row) on.
template <int Blocks>
__device__ __forceinline__ void store_rows(const float* d, const void* map, std::uint32_t buffer, int column,
                                           int row, int lane) {
#pragma unroll
    for (int block = 0; block < Blocks; ++block)
        store_block([&] { stage_block(d + 32 * block, buffer, lane); }, map, buffer, column + block * 64, row,
                    lane);
}

// By one warp: what `stage` leaves in its buffer, 16 rows of 128 bytes, by ordinary stores of whole lines
// from `first` on: with one buffer, a copy by the engine for each block would wait for the one before, and
// for the loads that are queued there. Signal the rows after __syncwarp only. No copy may
// still read the buffer.
template <class Stage>
__device__ __forceinline__ void store_block_directly(const Stage& stage, std::byte* first,
                                                     std::int64_t row_bytes, std::uint32_t buffer, int lane) {
    constexpr int kAtOnce = 4;  // rows
    std::byte* to = first + lane / 8 * row_bytes + lane % 8 * 16;
    __syncwarp();
    stage();
    __syncwarp();
    uint4 v[16 / kAtOnce];
#pragma unroll
    for (int i = 0; i < 16 / kAtOnce; ++i) {
        const int row = i * kAtOnce + lane / 8;
        v[i] = ptx::load_shared_vector(buffer + row * 128 + ((lane % 8 ^ row % 8) << 4));
    }
#pragma unroll
    for (int i = 0; i < 16 / kAtOnce; ++i)
        ptx::store(to + i * kAtOnce * row_bytes, v[i]);
}

// One warp's 16 rows x 64 `Blocks` columns of bf16 in the same way, with a buffer that copies may have read.
template <int Blocks>
__device__ __forceinline__ void store_rows_directly(const float* d, std::byte* first, std::int64_t row_bytes,
                                                    std::uint32_t buffer, int lane) {
    if (lane == 0) ptx::bulk_wait_read<0>();
#pragma unroll
    for (int block = 0; block < Blocks; ++block)
        store_block_directly([&] { stage_block(d + 32 * block, buffer, lane); }, first + block * 128,
                             row_bytes, buffer, lane);
    __syncwarp();
}

}  // namespace mega_moe::device::sm90
