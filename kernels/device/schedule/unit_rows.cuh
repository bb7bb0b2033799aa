#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/route/tables.cuh"
#include "layout/workspace.h"

namespace mega_moe::device {

// Rows of all units, by a whole warp: each lane holds one unit of two windows of 32, since a walk reads at
// two places that move forward.
class UnitRows {
  public:
    __device__ __forceinline__ UnitRows(const std::int32_t* rows, int units) : rows_(rows), units_(units) {}

    __device__ __forceinline__ int operator()(int unit) {
        const std::int32_t held = window(unit);
        return __shfl_sync(ptx::kAllLanes, held, unit % 32);
    }
    // First unit from `unit` on that has rows, or the number of units.
    __device__ __forceinline__ int next(int unit) {
        while (unit < units_) {
            const std::uint32_t filled = ptx::ballot(window(unit) > 0) & (0xFFFFFFFFu << (unit % 32));
            if (filled != 0) return unit / 32 * 32 + __ffs(static_cast<int>(filled)) - 1;
            unit = (unit / 32 + 1) * 32;
        }
        return units_;
    }

  private:
    __device__ __forceinline__ std::int32_t window(int unit) {
        const int base = unit / 32 * 32;
        if (base == base_0_) return held_0_;
        if (base == base_1_) return held_1_;
        const int at = base + static_cast<int>(ptx::lane_id());
        const std::int32_t held = at < units_ ? static_cast<std::int32_t>(ptx::load_relaxed_gpu(
                                                    reinterpret_cast<const std::uint32_t*>(rows_ + at)))
                                              : 0;
        // The window that moves is the nearest below.
        if (base_0_ < base && (base_1_ > base || base_1_ < base_0_)) {
            base_0_ = base;
            held_0_ = held;
        } else {
            base_1_ = base;
            held_1_ = held;
        }
        return held;
    }

    const std::int32_t* rows_;
    int units_;
    int base_0_ = -64;
    int base_1_ = -32;
    std::int32_t held_0_ = 0;
    std::int32_t held_1_ = 0;
};

// Where the units of the tiles lie.
struct UnitPlace {
    int unit = -1;
    int chunk;
    int expert;
    int first_slot;
    int row_of_slot;  // row in the pools minus slot

    __device__ __forceinline__ void move(const layout::LayerParams& p, int to) {
        if (to == unit) return;
        const layout::RouteParams& r = p.route;
        unit = to;
        chunk = to / r.num_local;
        expert = to - chunk * r.num_local;
        first_slot = table_word(r.expert_slots, to);
        const std::int32_t* row = r.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
        row_of_slot = static_cast<int>(layout::chunk_first_row(chunk, p.pool_rows)) -
                      table_word(row, layout::kChunkFirstSlot);
    }
};

}  // namespace mega_moe::device
