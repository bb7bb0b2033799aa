#pragma once
#include "bench/common/clock_span.cuh"
#include "bench/gemm/load.cuh"
#include "bench/gemm/multiply_promoted.cuh"
#include "bench/gemm/multiply_staggered.cuh"
#include "bench/gemm/store.cuh"
#include "device/ptx/register_budget.cuh"

namespace mega_moe::bench {

template <class C>
__device__ __forceinline__ void multiply_tiles(const GemmParams& p, const SharedMap<C>& shared,
                                               int first_tile, int tile_step, uint32_t rank) {
    const int lane = threadIdx.x % 32;
    const int consumer_warp = threadIdx.x / 32 - 4;
    const int warpgroup = consumer_warp / 4;
    StageCursor<C> cursor;
    int store_buffer = 0;
    uint32_t turn_parity = warpgroup == 0 ? 1 : 0;  // the first warpgroup starts without waiting
    if constexpr (C::kPingPong) {
        if (warpgroup == 1) cursor.skip(p.num_k_blocks);
        first_tile += warpgroup * tile_step;
        tile_step *= 2;
    }
    for (int tile = first_tile; tile < p.num_tiles; tile += tile_step) {
        TileOrigin origin = tile_origin<C>(tile, p.num_n_tiles, rank);
        Accumulators<C> sums;
#pragma unroll
        for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
            for (int i = 0; i < C::kPartRegisters; ++i)
                sums[part][i] = 0.0f;
        }
        if constexpr (C::kPingPong) {
            ptx::mbarrier_wait(shared.turn(warpgroup), turn_parity);
            turn_parity ^= 1;
            const int last_stage = multiply_tile<C>(sums, shared, cursor, p.num_k_blocks, 0, lane);
            if (lane == 0) ptx::mbarrier_arrive(shared.turn(1 - warpgroup));
            finish_tile<C>(shared, last_stage, lane);
            cursor.skip(p.num_k_blocks);
        } else {
            if constexpr (C::kPromoted) {
                if constexpr (C::kStaggered)
                    multiply_tile_staggered<C>(sums[0], shared, cursor, p, origin.column, warpgroup, lane);
                else
                    multiply_tile_promoted<C>(sums, shared, cursor, p, origin.column, warpgroup, lane);
            } else {
                const int rows = warpgroup * C::kWarpgroupRows * device::sm90::kOperandRowBytes;
                finish_tile<C>(shared, multiply_tile<C>(sums, shared, cursor, p.num_k_blocks, rows, lane),
                               lane);
            }
            origin.row += warpgroup * C::kWarpgroupRows;
        }
        store_tile<C>(sums, p, shared, origin, consumer_warp, lane, store_buffer);
    }
    if (lane == 0) ptx::bulk_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) gemm(const __grid_constant__ GemmParams p) {
    extern __shared__ uint8_t raw[];
    const SharedMap<C> shared(raw);
    const bool times = blockIdx.x == 0 && threadIdx.x == 0;
    if (times) start_clock(p.clock);
    if (threadIdx.x == 0) shared.init_barriers();
    sync_cluster_or_block<C>();

    const uint32_t rank = C::kClusterSize > 1 ? ptx::cluster_rank() : 0;
    const int first_tile = blockIdx.x / C::kClusterSize;
    const int tile_step = gridDim.x / C::kClusterSize;
    if (threadIdx.x < 128) {
        ptx::shrink_registers<C::kLoadRegisters>();
        if (threadIdx.x == 0) load_tiles<C>(p, shared, first_tile, tile_step, rank);
    } else {
        ptx::grow_registers<C::kMultiplyRegisters>();
        multiply_tiles<C>(p, shared, first_tile, tile_step, rank);
    }
    __syncwarp();
    // A block whose shared memory is gone can take no more arrivals and no more multicast of the other.
    sync_cluster_or_block<C>();
    if (times) stop_clock(p.clock);
}

}  // namespace mega_moe::bench
