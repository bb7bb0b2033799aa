#pragma once
#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/role/layer_rows.cuh"
#include "device/role/stage_quantise.cuh"
#include "layout/layer_shared.h"
#include "layout/scale_runs.h"

// Rows that come in bf16 and are quantised when they arrive, beside being stored as they are: a product of
// e4m3 reads the one, a sum over rows in bf16 the other.
namespace mega_moe::device {

// One warp: up to eight groups of a token's row, from `first` on, to each of its slots.
__device__ __forceinline__ void quantise_arrived(const ArrivedCodes& to, const ChunkView& view,
                                                 const TokenRows& t, int hidden, int first, int groups,
                                                 uint4 (&v)[kQuad]) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int half = lane / kLanesPerGroup;
    const int odd = lane & 1;
    const QuantisedQuad quad = quantise_quad(v, lane);
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

// The same of a piece of a row in shared memory, `bytes` of bf16 from byte `offset` of the row on, eight
// groups at most: codes by bulk stores of each lane's slot, one group of them, from `code_buffer`, which no
// store but the latest group may still read by the time that the codes are there.
__device__ __forceinline__ void quantise_piece(const ArrivedCodes& to, const ChunkView& view,
                                               const TokenRows& t, int hidden, int offset, int bytes,
                                               std::uint32_t buffer, std::uint32_t code_buffer) {
    constexpr int kGroupBytes = layout::kQuantGroup * 2;
    constexpr int kGroups = 2 * kQuad;
    static_assert(layout::kQuantisingPullBytes == kGroups * kGroupBytes);
    const int lane = static_cast<int>(ptx::lane_id());
    uint4 v[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
        v[i] = i * 512 < bytes ? ptx::load_shared_vector(buffer + i * 512 + lane * 16) : uint4{0, 0, 0, 0};
    const QuantisedQuad quad = quantise_quad(v, lane);
    ptx::bulk_wait_read<1>();
    __syncwarp();
    const std::uint32_t codes = code_buffer + (lane / 2 + 16 * (lane & 1)) * 16;
#pragma unroll
    for (int i = 0; i < kQuad; i += 2)
        ptx::store_shared(codes + i * 256, quad.codes[i / 2]);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane < t.rows)
        ptx::bulk_store(to.codes + (std::int64_t{t.slot} + view.row_of_slot) * hidden + offset / 2,
                        code_buffer, static_cast<std::uint32_t>(bytes / 2));
    ptx::bulk_commit();
    // Four slots at once; a lane has the scale factor of one group.
    const int group = lane % kGroups;
    const float scale =
        __shfl_sync(ptx::kAllLanes, quad.scale, group % 2 * kLanesPerGroup + scale_lane(group / 2));
#pragma unroll 1
    for (int first = 0; first < t.rows; first += 32 / kGroups) {
        const int slot = first + lane / kGroups;
        const std::int64_t row = __shfl_sync(ptx::kAllLanes, t.slot, slot) + view.row_of_slot;
        if (slot < t.rows && group < bytes / kGroupBytes)
            ptx::store(
                to.scales + layout::scale_at(row, offset / kGroupBytes + group, hidden / layout::kQuantGroup),
                scale);
    }
}

}  // namespace mega_moe::device
