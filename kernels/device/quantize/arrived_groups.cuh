#pragma once
#include <cstdint>

#include "device/ptx/global_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/quantize/groups.cuh"
#include "device/route/tables.cuh"
#include "layout/scale_runs.h"

// Rows that come in bf16 and are quantized when they arrive, and also stored as they are: a GEMM of
// e4m3 reads the one, a sum over rows in bf16 the other.
namespace mega_moe::device {

// One warp: up to eight groups of a token's row, from `first` on, to each of its slots.
__device__ __forceinline__ void quantize_arrived(const layout::ArrivedCodes& to, const ChunkView& view,
                                                 const TokenRows& t, int hidden, int first, int groups,
                                                 layout::ScaleRounding rounding, uint4 (&v)[kQuad]) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int half = lane / kLanesPerGroup;
    const int odd = lane & 1;
    const QuantizedQuad quad = quantize_quad(v, rounding, lane);
    const int own = quad_vector(lane);
    const int groups_left = groups - half;
#pragma unroll 1
    for (int slot = 0; slot < t.rows; ++slot) {
        const std::int64_t row = __shfl_sync(ptx::kAllLanes, t.slot, slot) + view.row_of_slot;
        std::byte* codes = to.codes + row * hidden + first * layout::kQuantGroup + (lane / 2 + 16 * odd) * 16;
#pragma unroll
        for (int i = 0; i < kQuad; i += 2)
            if (2 * (i + odd) < groups_left) ptx::store(codes + i * 256, quad.codes[i / 2]);
        if (own >= 0 && 2 * own < groups_left)
            ptx::store(
                to.scales + layout::scale_at(row, first + 2 * own + half, hidden / layout::kQuantGroup),
                quad.scale);
    }
}

}  // namespace mega_moe::device
