#pragma once
#include <cstdint>

#include "layout/host_device.h"

// Arithmetic of the routing tables: units of work, columns of the counts, chunks, and the encodings of their
// entries.
namespace mega_moe::layout {

inline constexpr int kMaxRanks = 32;
inline constexpr int kMaxSlotsPerToken = 16;
inline constexpr int kBlockTokens = 128;  // tokens, of all ranks, between which a chunk may end
inline constexpr int kPadRows = 128;      // an expert's rows in a chunk start on a multiple of this
inline constexpr int kMaxCtas = 256;
// Counts of CTAs are also summed by groups, so that a CTA finds its place from two short columns of sums.
inline constexpr int kCtasPerGroup = 16;
inline constexpr int kMaxGroups = kMaxCtas / kCtasPerGroup;

// A division of 64-bit numbers is a function call on a GPU.
MEGA_MOE_HD_CONSTEXPR int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

MEGA_MOE_HD_CONSTEXPR std::int64_t num_blocks(std::int64_t num_tokens) {
    return (num_tokens + kBlockTokens - 1) / kBlockTokens;
}

MEGA_MOE_HD_CONSTEXPR std::int64_t pad_rows(std::int64_t rows) {
    return (rows + kPadRows - 1) / kPadRows * kPadRows;
}

// Columns of a count: rows per local expert; resident tokens by first and by last local expert; all rows; all
// resident tokens. A token is resident on a rank that holds one of its experts.
MEGA_MOE_HD_CONSTEXPR int column_of_first(int num_local) {
    return num_local;
}
MEGA_MOE_HD_CONSTEXPR int column_of_last(int num_local) {
    return 2 * num_local;
}
MEGA_MOE_HD_CONSTEXPR int column_of_rows(int num_local) {
    return 3 * num_local;
}
MEGA_MOE_HD_CONSTEXPR int column_of_residents(int num_local) {
    return 3 * num_local + 1;
}
MEGA_MOE_HD_CONSTEXPR int num_columns(int num_local) {
    return 3 * num_local + 2;
}

// --- chunks
// -----------------------------------------------------------------------------------------------------------
// Where not all rows are one chunk, a chunk is the longest run of blocks that has at most so many rows, so
// that its padded rows fit into one pool.
MEGA_MOE_HD_CONSTEXPR std::int64_t chunk_limit(std::int64_t pool_rows, std::int64_t num_local) {
    return pool_rows - num_local * (kPadRows - 1);
}

// Rows that are one chunk, whatever the limit of others, because both pools together hold them: an expert's
// weights are then read once, and no sum of its gradients waits in memory for the next chunk.
MEGA_MOE_HD_CONSTEXPR std::int64_t joined_limit(std::int64_t pool_rows, std::int64_t num_local) {
    return 2 * pool_rows - num_local * (kPadRows - 1);
}

// Two neighbors together exceed the limit, or they would be one chunk.
MEGA_MOE_HD_CONSTEXPR std::int64_t max_chunks(std::int64_t max_rows, std::int64_t limit,
                                              std::int64_t blocks) {
    const std::int64_t by_rows = 2 * (max_rows / (limit + 1)) + 1;
    return blocks < 1 ? 1 : by_rows < blocks ? by_rows : blocks;
}

// First slot of a chunk: at least the padded rows of the chunks before it, and found without counting those.
MEGA_MOE_HD_CONSTEXPR std::int64_t chunk_first_slot(std::int64_t rows_before, std::int64_t chunk,
                                                    std::int64_t num_local) {
    return pad_rows(rows_before) + chunk * num_local * kPadRows;
}

// --- work of a CTA
// ---------------------------------------------------------------------------------------------------- A CTA
// takes a run of tokens of all ranks, in tiles with a thread for each (token, rank).
struct Work {
    int tile_tokens;
    int range_tokens;  // tokens of each CTA, a multiple of tile_tokens; no tile spans two blocks
};

inline constexpr int kMinTileTokens = 16;

MEGA_MOE_HD_CONSTEXPR int max_tile_tokens(int threads, int num_ranks) {
    int tokens = kBlockTokens;
    while (tokens * num_ranks > threads)
        tokens /= 2;
    return tokens;
}

MEGA_MOE_HD_CONSTEXPR Work split_work(int most_tokens, int num_ctas, int threads, int num_ranks) {
    const int longest = max_tile_tokens(threads, num_ranks);
    const int share = ceil_div(most_tokens, num_ctas);
    if (share >= longest) return {longest, ceil_div(share, longest) * longest};
    int tile = kMinTileTokens < longest ? kMinTileTokens : longest;
    while (tile < share)
        tile *= 2;
    return {tile, tile};
}

// --- encodings
// --------------------------------------------------------------------------------------------------------
// Where a row comes from: token, source rank, slot.
MEGA_MOE_HD_CONSTEXPR std::uint32_t encode_source(std::uint32_t token, std::uint32_t rank,
                                                  std::uint32_t slot) {
    return token | rank << 20 | slot << 25;
}

// What a rank says at the start of a launch: its number, what the rank calls, whether it refuses, its tokens.
inline constexpr int kHeaderEpochShift = 24;
inline constexpr int kHeaderCallShift = 21;
inline constexpr std::uint64_t kHeaderCallMask = 7;
inline constexpr std::uint64_t kHeaderRefused = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kHeaderTokens = kHeaderRefused - 1;

// Ranks of one launch must call alike; 0 is routing alone.
inline constexpr std::uint32_t kForwardCall = 1;
inline constexpr std::uint32_t kQuantizedForwardCall = 2;
MEGA_MOE_HD_CONSTEXPR std::uint32_t backward_call(bool needs_dx, bool needs_dtopk) {
    return 4 | (needs_dx ? 2u : 0u) | (needs_dtopk ? 1u : 0u);
}

MEGA_MOE_HD_CONSTEXPR std::uint64_t encode_header(std::uint64_t epoch, std::uint32_t call, bool refused,
                                                  std::uint64_t tokens) {
    return epoch << kHeaderEpochShift | std::uint64_t{call} << kHeaderCallShift |
           (refused ? kHeaderRefused : 0) | (tokens < kHeaderTokens ? tokens : kHeaderTokens);
}

}  // namespace mega_moe::layout
