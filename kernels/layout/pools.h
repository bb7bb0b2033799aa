#pragma once
#include <cstdint>

#include "layout/host_device.h"
#include "layout/routing.h"

// Arithmetic of the pools, where the rows of a chunk lie by slot, and of the counters that say how far each
// block of rows is. A slot is numbered over all chunks; its row in a pool is that of its chunk's part of the
// pool.
namespace mega_moe::layout {

inline constexpr int kRowBlock = 64;  // rows that a warpgroup multiplies, and one counter covers

// A row whose codes are there counts 1 in `arrived`, and this once it is there in bf16 too.
inline constexpr std::uint32_t kBf16RowThere = 1u << 16;

// Words that many CTAs add to lie a cache line apart.
inline constexpr int kCounterLine = 32;

// Counters, uint32, all zero when the routing of a launch ends:
//   tickets        [kCounterTickets][kCounterLine]: see CounterTicket
//   sent           [max_chunks]: entries of push_list that are sent
//   arrived        [row blocks]: rows of x in the pool; in the backward of x and dy, and the zeros after
//   them;
//                  where rows are quantized as they arrive, of the codes, and above kBf16RowThere in bf16 too
//   gate_up_done   [row blocks]: warps that stored their part of h; in the backward of dz and h
//   down_done      [row blocks]: warps that stored their part of the outputs; in the backward of dx
enum CounterTicket {
    kTileTicket,       // next tile after each cluster's first
    kPushTicket,       // next entry of push_list
    kOwnerTicket,      // next own token to sum
    kGradientTicket,   // next tile of a weight's gradient
    kTransposeTicket,  // next tile that transposes x or dy
    kCounterTickets
};

MEGA_MOE_HD_CONSTEXPR std::int64_t num_row_blocks(std::int64_t max_slots) {
    return (max_slots + kRowBlock - 1) / kRowBlock;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t counter_of_sent() {
    return kCounterTickets * kCounterLine;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t counter_of_arrived(std::int64_t max_chunks) {
    return counter_of_sent() + (max_chunks + kCounterLine - 1) / kCounterLine * kCounterLine;
}
MEGA_MOE_HD_CONSTEXPR std::int64_t num_counters(std::int64_t max_slots, std::int64_t max_chunks) {
    return counter_of_arrived(max_chunks) + 3 * num_row_blocks(max_slots);
}

// First row of a chunk in the pools: chunks alternate between them.
MEGA_MOE_HD_CONSTEXPR std::int64_t chunk_first_row(std::int64_t chunk, std::int64_t pool_rows) {
    return chunk % 2 * pool_rows;
}

}  // namespace mega_moe::layout
