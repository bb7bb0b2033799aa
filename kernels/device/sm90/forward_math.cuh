#pragma once
#include <cstdint>

#include "device/schedule/forward.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/epilogue/activate.cuh"
#include "device/sm90/epilogue/saved_gate_up.cuh"
#include "device/sm90/epilogue/store_rows.cuh"
#include "device/sm90/stages.cuh"

namespace mega_moe::device::sm90 {

// One warpgroup: its part of this CTA's tiles.
template <class C>
__device__ __forceinline__ void multiply_tiles(const layout::ForwardParams& p, const Smem<C>& shared,
                                               Tracer<C::kTrace>& tracer) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int math_warp = static_cast<int>(ptx::thread_id()) / 32 - 4;
    const int warpgroup = math_warp / 4;
    const int first_row = warpgroup * layout::kRowBlock;  // of the tile
    const int warp_row = first_row + math_warp % 4 * 16;
    RingCursor<C::kStages> stage;
    RingCursor<C::kRing> ring;
    DeferredSignal signal;
    tracer.start();
    for (;; ring.next()) {
        signal.wait(shared.ring_full(ring.at), ring.parity, lane);
        const TileRecord t = await_record<TileRecord>(shared, ring);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.ring_empty(ring.at));
        if (t.kind == kNoTile) break;
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp_row + lane / 4 + 8 * i;
            weight[i] = 0.0f;
            if (t.kind == kGateUpTile && row < t.rows)
                weight[i] = __uint_as_float(
                    static_cast<std::uint32_t>(ptx::load_relaxed_gpu(p.route.slots + t.slot + row) >> 32));
        }
        float d[C::kSums];
#pragma unroll
        for (int i = 0; i < C::kSums; ++i)
            d[i] = 0.0f;
        signal.wait(shared.full(stage.at), stage.parity, lane);
        const bool any_rows = t.rows > first_row;
        if (any_rows) tracer.end(TraceKind::kWaitTile, t.chunk, t.expert, trace_index(t, first_row));
        const int last_stage = multiply_tile<C>(d, shared, stage, t.k_blocks,
                                                static_cast<std::uint32_t>(first_row * kOperandRowBytes),
                                                any_rows, signal, lane);
        ptx::wgmma_wait<0>();
        release_stage<C>(shared, last_stage, lane);
        if (!any_rows) continue;
        const bool down = t.kind == kDownTile;
        tracer.end(down ? TraceKind::kDown : TraceKind::kGateUp, t.chunk, t.expert,
                   trace_index(t, first_row));
        const std::uint32_t buffer = shared.store_buffer(math_warp);
        signal.counter = p.counters + (t.slot + first_row) / layout::kRowBlock;
        if (down) {
            store_rows<C::kBlockN / 64>(d, &p.o_store, buffer, t.column, t.pool_row + warp_row, lane);
            signal.counter += p.down_done;
        } else {
            if constexpr (C::kSavesGateUp) {
                if (layout::is_saved(t.slot, p.saved.slots))
                    save_gate_up(
                        d, p.saved.memory + layout::saved_offset(
                                                t.slot + first_row, t.column / layout::kSavedColumns,
                                                p.intermediate / layout::kSavedColumns, math_warp % 4, lane));
            }
            with_activation(p.activation, [&](const auto& act) { activate_tile<true>(act, d, weight); });
            store_rows<C::kGateUpColumns / 64>(d, &p.h_store, buffer, t.column, t.pool_row + warp_row, lane);
            signal.counter += p.gate_up_done;
        }
        tracer.end(down ? TraceKind::kStoreDown : TraceKind::kStoreGateUp, t.chunk, t.expert,
                   trace_index(t, first_row));
    }
    signal.publish(lane);
}

}  // namespace mega_moe::device::sm90
