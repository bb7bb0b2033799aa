#pragma once
#include "bench/gemm/multiply.cuh"
#include "bench/gemm/params.h"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/tma.cuh"

namespace mega_moe::bench {

// One warp's 16 rows x 64 columns to bf16, through 2 KB of shared memory in the 128-byte swizzle. `d` are the
// accumulators of those columns: rows lane / 4 and + 8, columns 8 i + 2 (lane % 4) and + 1.
__device__ __forceinline__ void stage_block(const float (&d)[32], uint32_t buffer, int lane) {
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

// A warpgroup's part of a tile; each warp stores its own rows and waits for no other.
template <class C>
__device__ __forceinline__ void store_tile(Accumulators<C>& sums, const GemmParams& p,
                                           const SharedMap<C>& shared, TileOrigin origin, int consumer_warp,
                                           int lane, int& buffer) {
#pragma unroll
    for (int m = 0; m < C::kPartsM; ++m) {
#pragma unroll
        for (int block = 0; block < C::kBlockN / 64; ++block) {
            constexpr int kBlocksPerPart = C::kInstructionN / 64;
            auto& part = sums[m * C::kPartsN + block / kBlocksPerPart];
            const auto& d = reinterpret_cast<const float (&)[32]>(part[block % kBlocksPerPart * 32]);
            const uint32_t staging = shared.store_buffer(consumer_warp, buffer);
            if (lane == 0) ptx::bulk_wait_read<C::kStoreBuffers - 1>();
            __syncwarp();
            stage_block(d, staging, lane);
            ptx::fence_proxy_async_shared();
            __syncwarp();
            if (lane == 0) {
                ptx::tma_store(&p.d, staging, origin.column + block * 64,
                               origin.row + m * 64 + consumer_warp % 4 * 16);
                ptx::bulk_commit();
            }
            buffer = buffer + 1 == C::kStoreBuffers ? 0 : buffer + 1;
        }
    }
}

}  // namespace mega_moe::bench
