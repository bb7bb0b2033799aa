#pragma once
#include <cstdint>

#include "layout/gradient_operands.h"
#include "layout/gradients.h"
#include "layout/parts.h"
#include "layout/pools.h"
#include "layout/routing.h"
#include "mega_moe/mode.h"

namespace mega_moe::layout {

// A rank's own memory: counts, routing tables and pools, which no peer touches.
struct WorkspaceShape {
    std::int64_t max_tokens;
    std::int64_t top_k;
    std::int64_t num_local;  // experts of this rank
    std::int64_t num_ranks;
    std::int64_t pool_rows;  // padded rows of one of the pools
    std::int64_t hidden;
    std::int64_t intermediate;
    Mode mode;  // without a forward there are tables alone, no pools
    bool canaries;

    MEGA_MOE_HD_CONSTEXPR bool has_pools() const { return mode.forward != Precision::kNone; }
    MEGA_MOE_HD_CONSTEXPR bool has_backward() const { return mode.backward != Precision::kNone; }
    MEGA_MOE_HD_CONSTEXPR bool fp8_forward() const { return mode.forward == Precision::kFp8; }
    MEGA_MOE_HD_CONSTEXPR bool fp8_backward() const { return mode.backward == Precision::kFp8; }
    // Bytes of an element of x and h: one where the backward needs no bf16.
    MEGA_MOE_HD_CONSTEXPR std::int64_t row_element() const {
        return fp8_forward() && !has_backward() ? 1 : 2;
    }
    // wgrad reads its operands transposed, as e4m3.
    MEGA_MOE_HD_CONSTEXPR bool has_transposed() const { return mode.wgrad == Precision::kFp8; }
    MEGA_MOE_HD_CONSTEXPR GradientScales gradient_scales() const {
        return {static_cast<int>(hidden), static_cast<int>(intermediate)};
    }
    MEGA_MOE_HD_CONSTEXPR std::int64_t max_rows() const { return max_tokens * num_ranks * top_k; }
    MEGA_MOE_HD_CONSTEXPR std::int64_t limit() const { return chunk_limit(pool_rows, num_local); }
    MEGA_MOE_HD_CONSTEXPR std::int64_t chunks() const {
        return layout::max_chunks(max_rows(), limit(), num_blocks(max_tokens));
    }
    // Pools of the smallest size are not joined, so that few rows make many chunks: for tests.
    MEGA_MOE_HD_CONSTEXPR std::int64_t most_in_one() const {
        const bool joined = pools() == 2 && pool_rows >= smallest_pool() + kPadRows;
        return joined ? joined_limit(pool_rows, num_local) : limit();
    }
    MEGA_MOE_HD_CONSTEXPR std::int64_t max_slots() const {
        return chunk_first_slot(max_rows(), chunks(), num_local);
    }
    // A chunk is filled while the one before it is worked off.
    MEGA_MOE_HD_CONSTEXPR std::int64_t pools() const { return chunks() > 1 ? 2 : 1; }
    MEGA_MOE_HD_CONSTEXPR std::int64_t largest_pool() const {
        return max_rows() + num_local * (kPadRows - 1);
    }
    // An expert's weight gradients may be summed in several parts.
    MEGA_MOE_HD_CONSTEXPR bool has_parts() const { return chunks() > 1 || pool_rows > kPartRows; }
    MEGA_MOE_HD_CONSTEXPR std::int64_t partials() const {
        return has_parts() ? max_partials(max_rows(), chunks(), num_local) : 0;
    }
    MEGA_MOE_HD_CONSTEXPR std::int64_t counters() const {
        return has_backward() ? counter_of_transposed() + (has_transposed() ? num_row_blocks(max_slots()) : 0)
                              : num_counters(max_slots(), chunks());
    }
    // Behind the others of the backward.
    MEGA_MOE_HD_CONSTEXPR std::int64_t counter_of_transposed() const {
        return num_backward_counters(max_slots(), chunks(), num_local,
                                     all_gradient_tiles(hidden, intermediate), has_parts());
    }
    // A block is never split, so it must fit, or everything must.
    MEGA_MOE_HD_CONSTEXPR std::int64_t smallest_pool() const {
        const std::int64_t tokens = max_tokens < kBlockTokens ? max_tokens : kBlockTokens;
        return tokens * num_ranks * top_k + num_local * (kPadRows - 1);
    }
};

enum WorkspacePart {
    kSync,         // uint64: the words of SyncWord; zero at first
    kGroupCounts,  // uint32 [2][kMaxGroups][columns]: sums of CTAs of a group, launch n in bank n % 2; zero
                   // at first
    kCtaCounts,    // uint32 [kMaxCtas][columns]
    kBlockCounts,  // uint32 [max_blocks][columns]: counts of a block's CTA before the block; empty for one
                   // chunk
    kChunkTable,   // int32 [max_chunks][kChunkWords]
    kExpertRows,   // int32 [max_chunks][num_local]: rows of the expert in the chunk
    kExpertSlots,  // int32 [max_chunks][num_local]: its first slot
    kPullStarts,   // int32 [max_chunks][num_local]: its first entry of pull_list, as first local expert
    kPushStarts,   // int32 [max_chunks][num_local]: its first entry of push_list, as last local expert
    kSlots,        // uint64 [max_slots]: low word encode_source, high word the routing weight (fp32)
    kSlotList,     // uint32 [max_rows]: slots of resident tokens, tokens in canonical order, slots ascending
    // uint64 [max_residents], by (chunk, first local expert, token, rank). Low word: encode_source of token,
    // rank and number of its local rows minus 1; high word: where its slots start in the slot list.
    kPullList,
    kPushList,  // uint64 [max_residents]: entries as in the pull list, by last local expert
    kCounters,  // uint32: layout/pools.h
    kXPool,     // bf16 [pools][pool_rows, hidden]: rows of x by slot; e4m3 of a quantized forward
    kHPool,     // of the dtype of x [pools][pool_rows, intermediate]: weighted activations
    kOPool,     // bf16 [pools][pool_rows, hidden]: outputs of the down projection; in the backward dx by slot
    kDyPool,    // bf16 [pools][pool_rows, hidden]: rows of dy by slot
    kDzPool,    // bf16 [pools][pool_rows, 2 * intermediate]: gradients of gate and up
    kDtopkPool,    // fp32 [pools][pool_rows, intermediate / 128]: parts of the routing weights' gradients
    kPartials,     // fp32 [partials][3 * hidden * intermediate]: weight gradients between the parts of their
                   // sums
    kXScalePool,   // fp32 [pools][pool_rows, hidden / 128]: scale factors of x; in the backward as those of h
    kHScalePool,   // fp32 [pools][pool_rows / 128][intermediate / 128][128]: of h, so that a tile's are one
                   // run
    kXCodePool,    // e4m3 [pools][pool_rows, hidden]: rows of x, of a quantized backward
    kDyCodePool,   // e4m3 [pools][pool_rows, hidden]: rows of dy
    kDzCodePool,   // e4m3 [pools][pool_rows, 2 * intermediate]
    kDyScalePool,  // fp32 [pools][pool_rows / 128][hidden / 128][128]: of dy
    kDzScalePool,  // fp32 [pools][pool_rows / 128][2 * intermediate / 128][128]: of dz
    kOwnCodes,     // e4m3 [2][max_tokens, hidden]: x and dy of a quantized backward with EP=1, by token
    kOwnScales,    // fp32 [2][max_tokens, hidden / 128]: their scale factors
    // Operands of wgrad in e4m3, layout/gradient_operands.h; dz and h are then in kDzPool and kHPool.
    kXTransposedPool,    // [pools][pool_rows / 128][hidden / 128] blocks
    kDyTransposedPool,   // [pools][pool_rows / 128][hidden / 128] blocks
    kGradientScalePool,  // fp32 [pools][pool_rows / 128][GradientScales::length]
    kWorkspaceParts
};

enum SyncWord {
    kRecordEpochWord,         // launch of the last record
    kBadIdEpochWord,          // last launch of this rank with a bad id
    kBarrierWord = 16,        // CTAs that arrived in launch n, at word kBarrierWord + n % 2 * kBarrierStride
    kTablesBarrierWord = 48,  // CTAs whose part of the tables is written; zeroed by each launch that uses it
};
inline constexpr int kBarrierStride =
    16;  // words: a cache line, since one is zeroed while the other is polled
inline constexpr int kSyncWordCount = kTablesBarrierWord + kBarrierStride;
static_assert(kTablesBarrierWord == kBarrierWord + 2 * kBarrierStride);

enum ChunkWord {
    kChunkFirstToken,
    kChunkEndToken,
    kChunkFirstSlot,
    kChunkSlots,  // padded rows
    kChunkRows,
    kChunkFirstResident,  // in pull_list and push_list
    kChunkResidents,
    kChunkWords = 8
};

constexpr Layout<kWorkspaceParts> make_workspace(const WorkspaceShape& s) {
    const std::int64_t columns = num_columns(static_cast<int>(s.num_local));
    const std::int64_t blocks = num_blocks(s.max_tokens);
    const std::int64_t chunks = s.chunks();
    const std::int64_t table = chunks * s.num_local * 4;
    LayoutBuilder<kWorkspaceParts> builder(s.canaries);
    builder.add("sync", kSyncWordCount * 8);
    builder.add("group_counts", 2 * kMaxGroups * columns * 4);
    builder.add("cta_counts", kMaxCtas * columns * 4);
    builder.add("block_counts", chunks > 1 ? blocks * columns * 4 : 0);
    builder.add("chunk_table", chunks * kChunkWords * 4);
    builder.add("expert_rows", table);
    builder.add("expert_slots", table);
    builder.add("pull_starts", table);
    builder.add("push_starts", table);
    builder.add("slots", s.max_slots() * 8);
    builder.add("slot_list", s.max_rows() * 4);
    builder.add("pull_list", s.max_tokens * s.num_ranks * 8);
    builder.add("push_list", s.max_tokens * s.num_ranks * 8);
    const bool pooled = s.has_pools();
    const std::int64_t rows = pooled ? s.pools() * s.pool_rows : 0;
    builder.add("counters", pooled ? s.counters() * 4 : 0);
    builder.add("x_pool", rows * s.hidden * s.row_element());
    builder.add("h_pool",
                rows * s.intermediate * (s.has_transposed() && s.fp8_forward() ? 1 : s.row_element()));
    builder.add("o_pool", rows * s.hidden * 2);
    const std::int64_t backward_rows = s.has_backward() ? rows : 0;
    builder.add("dy_pool", backward_rows * s.hidden * 2);
    builder.add("dz_pool", backward_rows * s.intermediate * (s.has_transposed() ? 2 : 4));
    builder.add("dtopk_pool", backward_rows * (s.intermediate / 128) * 4);
    builder.add("partials",
                s.has_backward() && pooled ? s.partials() * 3 * s.hidden * s.intermediate * 4 : 0);
    const std::int64_t forward_codes = s.fp8_forward() ? rows : 0;
    const std::int64_t backward_codes = s.fp8_backward() ? rows : 0;
    const std::int64_t groups = s.hidden / kQuantGroup;
    const std::int64_t inner_groups = s.intermediate / kQuantGroup;
    builder.add("x_sf_pool", (s.fp8_forward() ? forward_codes : backward_codes) * groups * 4);
    builder.add("h_sf_pool", forward_codes * inner_groups * 4);
    builder.add("x_e4m3_pool", backward_codes * s.hidden);
    builder.add("dy_e4m3_pool", backward_codes * s.hidden);
    builder.add("dz_e4m3_pool", backward_codes * 2 * s.intermediate);
    builder.add("dy_sf_pool", backward_codes * groups * 4);
    builder.add("dz_sf_pool", backward_codes * 2 * inner_groups * 4);
    const std::int64_t own_tokens = backward_codes > 0 && s.num_ranks == 1 ? 2 * s.max_tokens : 0;
    builder.add("own_codes", own_tokens * s.hidden);
    builder.add("own_sf", own_tokens * groups * 4);
    const std::int64_t transposed = s.has_transposed() ? rows : 0;
    builder.add("x_t_pool", transposed * s.hidden);
    builder.add("dy_t_pool", transposed * s.hidden);
    builder.add("dw_sf_pool", pooled ? transposed / kTransposedEdge * s.gradient_scales().length() * 4 : 0);
    return builder.finish();
}

// What a launch reports, int32: the words below, tokens of each rank, then all columns of the counts.
enum SummaryWord {
    kSummaryStatus,  // 0, or the Kind of a fault; then every other word is -1, unless the fault is a bad id
    kSummaryChunks,
    kSummaryWords
};

MEGA_MOE_HD_CONSTEXPR std::int64_t summary_length(std::int64_t num_local, std::int64_t num_ranks) {
    return kSummaryWords + num_ranks + num_columns(static_cast<int>(num_local));
}

}  // namespace mega_moe::layout
