#pragma once
#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/tma.cuh"
#include "device/schedule/forward.cuh"
#include "device/schedule/record.cuh"
#include "device/sm90/stages_fp8.cuh"
#include "layout/scale_runs.h"

namespace mega_moe::device::sm90 {

// Scale factors of a tile's rows of h and one k-block: one run.
__device__ __forceinline__ const std::byte* h_scales_of(const layout::ForwardParams& p, const TileRecord& t,
                                                        int k_block) {
    return p.h_scales + layout::scale_run(t.pool_row, k_block, t.k_blocks) * layout::kRowScaleBytes;
}

// Scale factors of the first and of the second 128 columns of a tile's weights, k-block by k-block.
struct ColumnScales {
    const float* first;
    const float* second;
};

__device__ __forceinline__ ColumnScales column_scales_of(const layout::ForwardParams& p,
                                                         const TileRecord& t) {
    const float* scales = t.kind == kDownTile ? p.down_scales : p.gate_up_scales;
    return {scales + std::int64_t{t.weight_row / layout::kQuantGroup} * t.k_blocks,
            scales + std::int64_t{t.weight_row_2 / layout::kQuantGroup} * t.k_blocks};
}

// One thread: fills the stages with the operands of this CTA's tiles.
template <class C>
__device__ __forceinline__ void load_tiles(const layout::ForwardParams& p, const Smem<C>& shared, int cta,
                                           Tracer<C::kTrace>& tracer) {
    constexpr std::uint16_t kBoth = 3;
    RingCursor<C::kStages> stage;
    RingCursor<C::kRing> ring;
    int x_scales = 0;  // buffer that the next scale factors of x go to
    tracer.start();
    for (;; ring.next()) {
        const TileRecord t = await_record<TileRecord>(shared, ring);
        ptx::mbarrier_arrive(shared.ring_empty(ring.at));
        if (t.kind == kNoTile) return;
        const bool down = t.kind == kDownTile;
        // Orders the copies after the signals that the scheduler has seen.
        ptx::fence_proxy_async_global();
        tracer.end(down ? TraceKind::kWaitDown : TraceKind::kWaitGateUp, t.chunk, t.expert,
                   trace_index(t, 0));
        const layout::TensorMap* rows = down ? &p.h_load : &p.x_load;
        const layout::TensorMap* half_rows = down ? &p.h_half_load : &p.x_half_load;
        const layout::TensorMap* weights = down ? &p.down_load : &p.gate_up_load;
        ColumnScales column_scales = column_scales_of(p, t);
        const bool loads_weights = t.tail == 0 || t.rows > 0;
        for (int k_block = 0; k_block < t.k_blocks; ++k_block, stage.next()) {
            const std::uint32_t full = shared.full(stage.at);
            const int k = k_block * C::kBlockK;
            ptx::mbarrier_wait(shared.empty(stage.at), stage.parity ^ 1);
            const bool x_scaled = C::kFp8 && !down && k_block % layout::kScaleBlocks == 0;
            const bool h_scaled = C::kFp8 && down;
            ptx::mbarrier_arrive_expect(full, (loads_weights ? C::kStageBytes : C::kBytesA) +
                                                  (x_scaled ? layout::kXScaleBytes : 0) +
                                                  (h_scaled ? layout::kRowScaleBytes : 0));
            if constexpr (C::kFp8)
                load_column_scales(shared, stage.at, column_scales.first++, column_scales.second++);
            // The buffer's last scale factors were those of k-blocks whose stages are all released.
            if (x_scaled) {
                ptx::tma_load(shared.x_scales(x_scales), &p.x_scale_load, full, k_block, t.pool_row);
                x_scales ^= 1;
            }
            if (h_scaled)
                ptx::bulk_load(shared.row_scales(stage.at), h_scales_of(p, t, k_block),
                               layout::kRowScaleBytes, full);
            if (t.tail == 0) {
                ptx::tma_load(shared.a(stage.at), rows, full, k, t.pool_row);
                ptx::tma_multicast(shared.b(stage.at) + cta * (C::kBytesB / 2), weights, full, kBoth, k,
                                   cta == 0 ? t.weight_row : t.weight_row_2);
            } else {
                // Both CTAs load half of the rows, whether or not they have a block of columns.
                ptx::tma_multicast(shared.a(stage.at) + cta * (C::kBytesA / 2), half_rows, full, kBoth, k,
                                   t.pool_row + cta * (layout::kTileRows / 2));
                if (loads_weights) {
                    ptx::tma_load(shared.b(stage.at), weights, full, k, t.weight_row);
                    ptx::tma_load(shared.b(stage.at) + C::kBytesB / 2, weights, full, k, t.weight_row_2);
                }
            }
        }
        tracer.end(down ? TraceKind::kLoadDown : TraceKind::kLoadGateUp, t.chunk, t.expert,
                   trace_index(t, 0));
    }
}

}  // namespace mega_moe::device::sm90
