#pragma once
#include <cstdint>

#include "layout/routing.h"

namespace mega_moe::layout {

// What the threads of a CTA share while they route.
struct RouteState {
    std::uint64_t epoch;
    std::int32_t lost;         // the launch cannot begin: a rank gave up, or did not come
    std::int32_t stuck;        // a wait of this CTA ended without what it waited for
    std::int32_t refused;      // a rank, plus 1, that refused the call
    std::int32_t most_tokens;  // of any rank
    std::int32_t tokens[kMaxRanks];
    std::uint32_t all_rows;     // of all CTAs
    std::uint32_t rows_before;  // of the chunks before this one, as the next
    std::uint32_t residents_before;
    std::uint32_t chunk_rows;
    std::uint32_t chunk_residents;
    std::uint32_t padded_rows;  // of the chunk
};

// Byte offsets in dynamic shared memory.
struct RouteShared {
    std::int64_t state;
    std::int64_t counts;  // uint32 [columns]: counts of this CTA, later where its next entries go
    std::int64_t rows;    // uint32 [warps][columns]: counts of each warp, later where its next entries go
    std::int64_t
        masks;  // uint32 [warps][3 * num_local]: lanes by column; the first row also serves the scans
    std::int64_t cta_rows;  // uint32 [kMaxCtas]: rows before each CTA, with several chunks only
    std::int64_t before;    // uint32 [max_blocks]: rows before each block, with several chunks only
    std::int64_t total;
};

// Warps of a CTA that take tokens. Fewer for few ranks, which have more experts each and thus longer rows.
MEGA_MOE_HD_CONSTEXPR int route_warps(int threads, int num_ranks) {
    return (max_tile_tokens(threads, num_ranks) * num_ranks + 31) / 32;
}

MEGA_MOE_HD_CONSTEXPR RouteShared make_route_shared(int threads, int num_ranks, int num_local,
                                                    std::int64_t max_blocks, bool one_chunk) {
    const std::int64_t warps = route_warps(threads, num_ranks);
    RouteShared s{};
    s.state = 0;
    s.counts = (std::int64_t{sizeof(RouteState)} + 15) / 16 * 16;
    s.rows = s.counts + num_columns(num_local) * 4;
    s.masks = s.rows + warps * num_columns(num_local) * 4;
    s.cta_rows = s.masks + warps * column_of_rows(num_local) * 4;
    s.before = s.cta_rows + (one_chunk ? 0 : kMaxCtas * 4);
    s.total = s.before + (one_chunk ? 0 : max_blocks * 4);
    return s;
}

}  // namespace mega_moe::layout
