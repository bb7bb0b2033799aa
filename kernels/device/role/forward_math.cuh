#pragma once
#include <cstdint>

#include "device/epilogue/store_rows.cuh"
#include "device/epilogue/swiglu.cuh"
#include "device/mma/multiply_stage.cuh"
#include "device/role/forward_schedule.cuh"

namespace mega_moe::device {

// By one warp: both CTAs may overwrite the stage.
template <class C>
__device__ __forceinline__ void release_stage(const ForwardShared<C>& shared, int stage, int lane) {
    if (lane < C::kClusterSize) ptx::mbarrier_arrive_at(shared.empty(stage), static_cast<std::uint32_t>(lane));
}

// One tile, but for its last products, which are still under way: their stage is returned. A stage is released
// when the next one's products are under way, so that the tensor cores never run dry.
template <class C>
__device__ __forceinline__ int multiply_tile(float (&d)[128], const ForwardShared<C>& shared,
                                             RingCursor<C::kStages>& stage, int k_blocks, int lane) {
    int previous = 0;
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
        ptx::mbarrier_wait(shared.full(stage.at), stage.parity);
        multiply_stage(d, shared.a(stage.at), shared.b(stage.at));
        ptx::wgmma_wait<1>();
        if (k_block > 0) release_stage<C>(shared, previous, lane);
        previous = stage.at;
        stage.next();
    }
    return previous;
}

// One warpgroup: every other tile of this CTA. The other warpgroup multiplies while this one stores.
template <class C>
__device__ __forceinline__ void multiply_tiles(const ForwardParams& p, const ForwardShared<C>& shared,
                                               Tracer<C::kTrace>& tracer) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int math_warp = static_cast<int>(threadIdx.x) / 32 - 4;
    const int warpgroup = math_warp / 4;
    const int warp_row = math_warp % 4 * 16;
    RingCursor<C::kStages> stage;
    RingCursor<C::kRing> ring;
    std::uint32_t turn_parity = warpgroup == 0 ? 1 : 0;  // the first warpgroup's first turn needs no leave
    bool own = warpgroup == 0;
    tracer.start();
    for (;; ring.next(), own = !own) {
        const TileRecord t = await_record<C>(shared, ring);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.ring_empty(ring.at));
        if (t.kind == kNoTile) return;
        if (!own) {
            stage.skip(t.k_blocks);
            continue;
        }
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp_row + lane / 4 + 8 * i;
            weight[i] = 0.0f;
            if (t.kind == kGateUpTile && row < t.rows)
                weight[i] = __uint_as_float(
                    static_cast<std::uint32_t>(ptx::load_relaxed_gpu(p.route.slots + t.slot + row) >> 32));
        }
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        ptx::mbarrier_wait(shared.turn(warpgroup), turn_parity);
        turn_parity ^= 1;
        // Here and not in the loop alone, so that a trace tells waiting for operands from products.
        if constexpr (C::kTrace) ptx::mbarrier_wait(shared.full(stage.at), stage.parity);
        if (t.rows > 0) tracer.end(TraceKind::kWaitTurn, t.chunk, t.expert, trace_index(t));
        const int last_stage = multiply_tile<C>(d, shared, stage, t.k_blocks, lane);
        if (lane == 0) ptx::mbarrier_arrive(shared.turn(1 - warpgroup));
        ptx::wgmma_wait<0>();
        release_stage<C>(shared, last_stage, lane);
        if (t.rows > 0) {
            tracer.end(t.kind == kDownTile ? TraceKind::kDown : TraceKind::kGateUp, t.chunk, t.expert,
                       trace_index(t));
            const std::uint32_t buffer = shared.store_buffer(math_warp);
            const std::int64_t block = t.slot / layout::kRowBlock;
            std::uint32_t* done = p.counters + block;
            if (t.kind == kGateUpTile) {
                swiglu_tile(d, weight, p.clamp);
                store_rows<2>(d, &p.h_store, buffer, t.column, t.pool_row + warp_row, lane);
                done += p.gate_up_done;
            } else {
                store_rows<4>(d, &p.o_store, buffer, t.column, t.pool_row + warp_row, lane);
                done += p.down_done;
            }
            if (lane == 0) {
                // Written, not only read from the buffer: whoever sees the count reads the rows.
                ptx::bulk_wait<0>();
                ptx::add_release_gpu(done, 1);
            }
            tracer.end(t.kind == kDownTile ? TraceKind::kStoreDown : TraceKind::kStoreGateUp, t.chunk,
                       t.expert, trace_index(t));
        }
    }
}

}  // namespace mega_moe::device
