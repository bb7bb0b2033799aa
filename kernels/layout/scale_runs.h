#pragma once
#include <cstdint>

#include "layout/host_device.h"
#include "layout/layer_shared.h"

// Where the scale factors of the rows of a pool lie that a kernel quantizes itself: of each tile's rows one
// run for a k-block, run by run, as the stages of a GEMM take them.
namespace mega_moe::layout {

// The run of `group`, a block of 128 columns, in the tile's rows that begin with `row`; in runs.
MEGA_MOE_HD_CONSTEXPR std::int64_t scale_run(std::int64_t row, int group, int groups) {
    return row / kTileRows * groups + group;
}

// The scale factor of `row`, in fp32 numbers.
MEGA_MOE_HD_CONSTEXPR std::int64_t scale_at(std::int64_t row, int group, int groups) {
    return scale_run(row, group, groups) * kTileRows + row % kTileRows;
}

}  // namespace mega_moe::layout
