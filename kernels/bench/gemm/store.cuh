#pragma once
#include "bench/gemm/multiply.cuh"
#include "bench/gemm/params.h"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/tma.cuh"
#include "device/sm90/epilogue/store_rows.cuh"

namespace mega_moe::bench {

// A warpgroup's part of a tile; each warp stores its own rows and waits for no other.
template <class C>
__device__ __forceinline__ void store_tile(Accumulators<C>& sums, const GemmParams& p,
                                           const SharedMap<C>& shared, TileOrigin origin, int consumer_warp,
                                           int lane, int& buffer) {
#pragma unroll
    for (int m = 0; m < C::kPartsM; ++m) {
#pragma unroll
        for (int block = 0; block < C::kBlockN / 64; ++block) {
            // A part may come from several instructions.
            constexpr int kBlocksPerPart = C::kPartRegisters / 32;
            static_assert(C::kPartsN * kBlocksPerPart * 64 == C::kBlockN, "parts of a row of blocks");
            auto& part = sums[m * C::kPartsN + block / kBlocksPerPart];
            const auto& d = reinterpret_cast<const float (&)[32]>(part[block % kBlocksPerPart * 32]);
            const uint32_t staging = shared.store_buffer(consumer_warp, buffer);
            if (lane == 0) ptx::bulk_wait_read<C::kStoreBuffers - 1>();
            __syncwarp();
            device::sm90::stage_block(d, staging, lane);
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
