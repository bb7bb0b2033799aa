#pragma once
#include "bench/gemm/params.h"
#include "bench/gemm/pipeline.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/tma.cuh"

namespace mega_moe::bench {

template <class C>
__device__ __forceinline__ void load_stage(const GemmParams& p, const SharedMap<C>& shared, int stage,
                                           int k_block, TileOrigin origin, uint32_t rank) {
    using device::sm90::Major;
    const uint32_t full = shared.full(stage);
    const int k = k_block * C::kBlockK;
    if constexpr (C::kMajorA == Major::kK) {
        ptx::tma_load(shared.a(stage), &p.a, full, k, origin.row);
    } else {
        ptx::tma_load(shared.a(stage), &p.a, full, 0, k, origin.row / 64);
    }
    if constexpr (C::kClusterSize == 1) {
        if constexpr (C::kMajorB == Major::kK) {
            ptx::tma_load(shared.b(stage), &p.b, full, k, origin.column);
        } else {
            ptx::tma_load(shared.b(stage), &p.b, full, 0, k, origin.column / 64);
        }
    } else {
        constexpr uint16_t kBothBlocks = 3;
        const int column = origin.column + static_cast<int>(rank) * (C::kBlockN / 2);
        const uint32_t half = shared.b(stage) + rank * (C::kBytesB / 2);
        if constexpr (C::kMajorB == Major::kK) {
            ptx::tma_multicast(half, &p.b, full, kBothBlocks, k, column);
        } else {
            ptx::tma_multicast(half, &p.b, full, kBothBlocks, 0, k, column / 64);
        }
    }
    if constexpr (C::kPromoted) {
        ptx::bulk_load(shared.scale(stage), p.a_scale + static_cast<int64_t>(k_block) * p.rows + origin.row,
                       C::kScaleBytes, full);
    }
}

// One thread: fills the stages of all tiles of this block.
template <class C>
__device__ __forceinline__ void load_tiles(const GemmParams& p, const SharedMap<C>& shared, int first_tile,
                                           int tile_step, uint32_t rank) {
    StageCursor<C> cursor;
    for (int tile = first_tile; tile < p.num_tiles; tile += tile_step) {
        const TileOrigin origin = tile_origin<C>(tile, p.num_n_tiles, rank);
        for (int k_block = 0; k_block < p.num_k_blocks; ++k_block) {
            ptx::mbarrier_wait(shared.empty(cursor.stage), cursor.parity ^ 1);
            ptx::mbarrier_arrive_expect(shared.full(cursor.stage), C::kStageBytes + C::kScaleBytes);
            load_stage<C>(p, shared, cursor.stage, k_block, origin, rank);
            cursor.next();
        }
    }
}

}  // namespace mega_moe::bench
