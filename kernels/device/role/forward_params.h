#pragma once
#include <cstdint>

#include "device/role/route_params.h"
#include "device/tile/tensor_map.h"
#include "layout/trace.h"

namespace mega_moe::device {

// Parameters of the fused forward. Maps name the rows of their boxes; all boxes are 64 columns wide.
struct ForwardParams {
    TensorMap x_load;        // x pool, rows of a tile
    TensorMap x_half_load;   // the same, half of them
    TensorMap h_load;        // h pool, rows of a tile
    TensorMap h_half_load;   // the same, half of them
    TensorMap gate_up_load;  // w_gate_up as [num_local * 2 * intermediate, hidden], 128 rows
    TensorMap down_load;     // w_down as [num_local * hidden, intermediate], 128 rows
    TensorMap h_store;       // h pool, 16 rows
    TensorMap o_store;       // o pool, 16 rows
    RouteParams route;
    const std::byte* x;  // the caller's, bf16 [num_tokens, hidden]
    std::byte* y;        // the caller's, bf16 [num_tokens, hidden]
    std::byte* x_pool;
    const std::byte* o_pool;
    std::uint32_t* counters;  // layout/pools.h
    std::int64_t num_counters;
    std::int64_t sent;  // first words of the counters by kind
    std::int64_t arrived;
    std::int64_t gate_up_done;
    std::int64_t down_done;
    std::int64_t x_staged;  // offsets in each rank's symmetric buffer
    std::int64_t x_flags;
    std::int64_t sent_flags;
    std::int64_t home;
    std::int64_t pool_rows;  // of one chunk
    std::int32_t hidden;
    std::int32_t intermediate;
    float clamp;               // +inf: none
    std::uint32_t delay_seed;  // 0: none; else pauses in the communication roles, for tests
    layout::TraceBuffer trace;
};

}  // namespace mega_moe::device
