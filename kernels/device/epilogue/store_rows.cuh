#pragma once
#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/tma.cuh"

namespace mega_moe::device {

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

// One warp's 16 rows x 64 `Blocks` columns, by the map's boxes of 16 x 64 from (column, row) on.
template <int Blocks>
__device__ __forceinline__ void store_rows(const float* d, const void* map, std::uint32_t buffer, int column,
                                           int row, int lane) {
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
        stage_block(d + 32 * block, buffer, lane);
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) {
            ptx::tma_store(map, buffer, column + block * 64, row);
            ptx::bulk_commit();
        }
    }
}

}  // namespace mega_moe::device
