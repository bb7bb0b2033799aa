#pragma once
#include <cstdint>

#include "device/schedule/forward.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/epilogue/activate.cuh"
#include "device/sm90/epilogue/quantize_rows.cuh"
#include "device/sm90/epilogue/saved_gate_up.cuh"
#include "device/sm90/epilogue/store_rows.cuh"
#include "device/sm90/stages_fp8.cuh"
#include "layout/scale_runs.h"

namespace mega_moe::device::sm90 {

// Scale factors of x, which come for kScaleBlocks k-blocks at once, with the stage of the first of these.
template <class C>
struct RowScalesOfX {
    static constexpr int kStride = layout::kScaleBlocks * 4;
    const Smem<C>& shared;
    int first;  // buffer of the first k-blocks

    __device__ __forceinline__ std::uint32_t operator()(int, int k_block) const {
        return shared.x_scales((first + k_block / layout::kScaleBlocks) % 2) +
               k_block % layout::kScaleBlocks * 4;
    }
};

// What a warp needs of a tile while it multiplies. The rest is read again from the record, which it keeps for
// so long: the accumulators leave no registers for it.
struct TileInput {
    std::int32_t kind;
    std::int32_t k_blocks;
    std::int32_t slot;
    std::int32_t rows;
};

__device__ __forceinline__ TileInput tile_input(const TileRecord& t) {
    return {t.kind, t.k_blocks, t.slot, t.rows};
}

template <class C>
__device__ __forceinline__ void trace_end(Tracer<C::kTrace>& tracer, TraceKind kind, const TileRecord& t,
                                          int first_row) {
    tracer.end(kind, t.chunk, t.expert, trace_index(t, first_row));
}

// One warp: stores its part of a tile, which `signal` then announces.
template <class C>
__device__ __forceinline__ void store_quantized_tile(const layout::ForwardParams& p, const Smem<C>& shared,
                                                     const TileRecord& t, int math_warp, float (&d)[128],
                                                     float lane_weight, IndexedDeferredSignal<C>& signal,
                                                     int lane) {
    const int first_row = math_warp / 4 * layout::kRowBlock;
    const int warp_row = first_row + math_warp % 4 * 16;
    const std::uint32_t buffer = shared.store_buffer(math_warp);
    // A tile with few k-blocks may end before it has signaled the previous one.
    signal.publish(lane);
    signal.counter = (t.slot + first_row) / layout::kRowBlock;
    if (t.kind == kDownTile) {
        const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
        store_rows_directly<4>(d, p.o_pool + (t.pool_row + warp_row) * row_bytes + t.column * 2, row_bytes,
                               buffer, lane);
        signal.counter += static_cast<std::int32_t>(p.down_done);
        return;
    }
    const float weight[2] = {__shfl_sync(ptx::kAllLanes, lane_weight, lane / 4),
                             __shfl_sync(ptx::kAllLanes, lane_weight, lane / 4 + 8)};
    if constexpr (C::kSavesGateUp) {
        if (layout::is_saved(t.slot, p.saved.slots))
            save_gate_up(
                d, p.saved.memory + layout::saved_offset(t.slot + first_row, t.column / layout::kSavedColumns,
                                                         p.intermediate / layout::kSavedColumns,
                                                         math_warp % 4, lane));
    }
    with_activation(p.activation, [&](const auto& act) { activate_tile<false>(act, d, weight); });
    const std::int64_t run =
        layout::scale_run(t.pool_row, t.column_block, p.intermediate / layout::kQuantGroup);
    quantize_rows(d, weight, p.rounding, &p.h_store, buffer, shared.store_scales(math_warp), t.column,
                  t.pool_row + warp_row, p.h_scales + run * layout::kRowScaleBytes + warp_row * 4, lane);
    signal.counter += static_cast<std::int32_t>(p.gate_up_done);
}

// One warpgroup: its part of this CTA's tiles.
template <class C>
__device__ __forceinline__ void multiply_tiles_fp8(const layout::ForwardParams& p, const Smem<C>& shared,
                                                   Tracer<C::kTrace>& tracer) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int math_warp = static_cast<int>(ptx::from_lane(ptx::thread_id() / 32, 0)) - 4;
    const int first_row = math_warp / 4 * layout::kRowBlock;  // of the tile
    const int warp_row = first_row + math_warp % 4 * 16;
    int x_scales = 0;
    RingCursor<C::kStages> stage;
    RingCursor<C::kRing> ring;
    IndexedDeferredSignal<C> signal(p.counters);
    tracer.start();
    for (;; ring.next()) {
        signal.wait(shared.ring_full(ring.at), ring.parity, lane);
        const auto record = [&] { return *reinterpret_cast<const TileRecord*>(shared.record(ring.at)); };
        const auto release_record = [&] {
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(shared.ring_empty(ring.at));
        };
        const TileInput t = tile_input(record());
        if (t.kind == kNoTile) break;
        const bool down = t.kind == kDownTile;
        const int first_x_scales = x_scales;
        if (!down) x_scales = (x_scales + t.k_blocks / layout::kScaleBlocks) % 2;
        if (t.rows <= first_row) {
            release_record();
            pass_tile<C>(shared, stage, t.k_blocks, signal, lane);
            continue;
        }
        // Lane i holds the routing weight of the warp's row i.
        float lane_weight = 0.0f;
        if (!down && lane < 16 && warp_row + lane < t.rows)
            lane_weight = __uint_as_float(static_cast<std::uint32_t>(
                ptx::load_relaxed_gpu(p.route.slots + t.slot + warp_row + lane) >> 32));
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        signal.wait(shared.full(stage.at), stage.parity, lane);
        trace_end<C>(tracer, TraceKind::kWaitTile, record(), first_row);
        if (down)
            multiply_quantized(d, shared, stage, t.k_blocks, signal, RowScalesOfStage<C>{shared}, math_warp,
                               lane);
        else
            multiply_quantized(d, shared, stage, t.k_blocks, signal, RowScalesOfX<C>{shared, first_x_scales},
                               math_warp, lane);
        const TileRecord tile = record();
        release_record();
        trace_end<C>(tracer, down ? TraceKind::kDown : TraceKind::kGateUp, tile, first_row);
        store_quantized_tile<C>(p, shared, tile, math_warp, d, lane_weight, signal,
                                static_cast<int>(ptx::lane_id_anew()));
        trace_end<C>(tracer, down ? TraceKind::kStoreDown : TraceKind::kStoreGateUp, tile, first_row);
    }
    signal.publish(lane);
}

}  // namespace mega_moe::device::sm90
