#include <cstdio>
#include <initializer_list>

#include "cpu/check.h"
#include "layout/route_shared.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

// The layouts of the symmetric buffer and of the workspace for 1, 2, 8 and 32 ranks: printed, and held
// against what the parts need.
namespace {

namespace layout = mega_moe::layout;

constexpr std::int64_t kTokens = 16384;
constexpr std::int64_t kTopK = 8;
constexpr std::int64_t kExperts = 128;
constexpr std::int64_t kHidden = 2048;

constexpr layout::SymmetricShape symmetric(std::int64_t ranks) {
    return {kTokens, kTopK, kHidden, ranks, false, true, false, false};
}

constexpr layout::WorkspaceShape workspace(std::int64_t ranks, std::int64_t pool_rows) {
    return {kTokens, kTopK, kExperts / ranks, ranks, pool_rows, kHidden, 0, false, false};
}

constexpr std::int64_t whole_pool(std::int64_t ranks) {
    return layout::pad_rows(workspace(ranks, 0).largest_pool());
}

// Peers of one buffer must agree on these, so they are fixed here and not derived.
static_assert(layout::make_symmetric(symmetric(1)).total == 69469952);
static_assert(layout::make_symmetric(symmetric(8)).total == 606364416);
static_assert(layout::make_symmetric(symmetric(8))[layout::kStaging] == 1581568);
static_assert(layout::make_workspace(workspace(1, whole_pool(1))).parts[layout::kSlots].bytes == 1179648);
static_assert(workspace(8, whole_pool(8)).chunks() == 1);
static_assert(workspace(8, 65536 + 16 * 127).chunks() == 31);

template <int Count>
void print(const char* title, const layout::Layout<Count>& l) {
    std::printf("%s: %lld bytes\n", title, static_cast<long long>(l.total));
    for (const layout::Part& part : l.parts)
        std::printf("  %-18s %12lld %12lld\n", part.name, static_cast<long long>(part.offset),
                    static_cast<long long>(part.bytes));
}

template <int Count>
void check_parts(const layout::Layout<Count>& l, bool canaries) {
    const std::int64_t gap = canaries ? layout::kCanaryBytes : 0;
    std::int64_t next = gap;
    for (const layout::Part& part : l.parts) {
        CHECK(part.name != nullptr, "a part without a name");
        CHECK(part.offset == next, "%s starts at %lld, want %lld", part.name,
              static_cast<long long>(part.offset), static_cast<long long>(next));
        CHECK(part.offset % layout::kPartAlignment == 0 && part.bytes >= 0, "%s", part.name);
        next = part.offset + layout::align_part(part.bytes) + gap;
    }
    CHECK(l.total == next, "total is %lld, want %lld", static_cast<long long>(l.total),
          static_cast<long long>(next));
}

void test_chunks() {
    for (const std::int64_t limit : {1024, 5000, 100000})
        for (const std::int64_t blocks : {1, 7, 128}) {
            // The worst case that the bound must hold: just more than half the limit in every block.
            const std::int64_t rows = limit / 2 + 1;
            const std::int64_t bound = layout::max_chunks(rows * blocks, limit, blocks);
            CHECK(bound >= blocks, "bound is %lld for %lld chunks", static_cast<long long>(bound),
                  static_cast<long long>(blocks));
        }
    for (int num_local : {1, 2, 16, 127, 128, 384})
        for (std::int64_t rows_before : {0, 1, 127, 128, 1000}) {
            // Rows that pad worst: one in each expert but the first.
            const std::int64_t rows = num_local;
            const std::int64_t padded = std::int64_t{num_local} * layout::kPadRows;
            CHECK(layout::chunk_first_slot(rows_before, 3, num_local) + padded <=
                      layout::chunk_first_slot(rows_before + rows, 4, num_local),
                  "a chunk reaches into the next for %d experts", num_local);
        }
}

void test_work() {
    for (const int threads : {128, 384, 512, 1024})
        for (const int ranks : {1, 2, 3, 8, 32})
            for (const int ctas : {1, 16, 132, 256})
                for (const int tokens : {0, 1, 127, 2048, 16384, 32768, 1048575}) {
                    const layout::Work w = layout::split_work(tokens, ctas, threads, ranks);
                    CHECK(std::int64_t{w.range_tokens} * ctas >= tokens, "tokens left over");
                    CHECK(w.range_tokens % w.tile_tokens == 0 && layout::kBlockTokens % w.tile_tokens == 0,
                          "tiles");
                    CHECK(w.tile_tokens * ranks <= threads, "a tile has more tokens than threads");
                }
}

}  // namespace

void test_layouts() {
    for (const std::int64_t ranks : {1, 2, 8, 32}) {
        std::printf("%lld ranks, %lld tokens, top %lld of %lld experts, hidden %lld\n",
                    static_cast<long long>(ranks), static_cast<long long>(kTokens),
                    static_cast<long long>(kTopK), static_cast<long long>(kExperts),
                    static_cast<long long>(kHidden));
        print("symmetric", layout::make_symmetric(symmetric(ranks)));
        print("workspace", layout::make_workspace(workspace(ranks, whole_pool(ranks))));
        for (const bool canaries : {false, true}) {
            layout::SymmetricShape s = symmetric(ranks);
            s.canaries = canaries;
            check_parts(layout::make_symmetric(s), canaries);
            layout::WorkspaceShape w = workspace(ranks, whole_pool(ranks));
            w.canaries = canaries;
            check_parts(layout::make_workspace(w), canaries);
            w.intermediate = 768;  // with pools, in turn where there are several chunks
            check_parts(layout::make_workspace(w), canaries);
            w.pool_rows = layout::pad_rows(w.smallest_pool());
            CHECK(ranks > 8 || w.pools() == 2, "%lld pools", static_cast<long long>(w.pools()));
            check_parts(layout::make_workspace(w), canaries);
        }
    }
    test_chunks();
    test_work();
}
