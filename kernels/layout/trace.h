#pragma once
#include <cstdint>

#include "layout/host_device.h"

// Events of the tracing variant of a kernel.
namespace mega_moe::layout {

enum class TraceRole { kLoad, kMath0, kMath1, kPull, kPush, kCount };

enum class TraceKind : std::int64_t {
    kWaitGateUp = 1,  // the loading warp waits for the inputs of a tile
    kWaitDown,
    kLoadGateUp,
    kLoadDown,
    kWaitTile,  // a math warpgroup waits for a tile, its loads or the other warpgroup
    kGateUp,    // GEMMs
    kDown,
    kStoreGateUp,  // epilogue
    kStoreDown,
    kWaitPull,
    kPull,
    kWaitPush,
    kPush,
    kWaitOwnerSum,
    kOwnerSum,
    kRoute,
    kFirstRows,  // all warps copy what the first tiles need into the pools
    kWaitDz,     // of the backward: the loading warp waits for the inputs of a tile
    kWaitDx,
    kWaitGradient,
    kLoadDz,
    kLoadDx,
    kLoadGradient,
    kDz,  // GEMMs
    kDx,
    kGradient,
    kStoreDz,  // epilogue
    kStoreDx,
    kStoreGradient
};

// Where a launch writes what its roles did: int64 [ctas][roles][capacity][3], a code, start and end in
// nanoseconds.
struct TraceBuffer {
    std::int64_t* rows;
    std::int64_t capacity;
};

MEGA_MOE_HD_CONSTEXPR std::int64_t trace_code(TraceKind kind, int chunk, int expert, int index) {
    return static_cast<std::int64_t>(kind) | static_cast<std::int64_t>(chunk) << 8 |
           static_cast<std::int64_t>(expert) << 24 | static_cast<std::int64_t>(index) << 40;
}

}  // namespace mega_moe::layout
