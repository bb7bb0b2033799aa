#include <cstdio>
#include <initializer_list>
#include <vector>

#include "cpu/check.h"
#include "layout/layer_shared.h"
#include "layout/route_shared.h"
#include "layout/scale_runs.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

// The layouts of the symmetric buffer and of the workspace for 1, 2, 8 and 32 ranks: printed, and held
// against what the parts need.
namespace {

namespace layout = mega_moe::layout;
using mega_moe::Mode;
using mega_moe::Precision;

constexpr std::int64_t kTokens = 16384;
constexpr std::int64_t kTopK = 8;
constexpr std::int64_t kExperts = 128;
constexpr std::int64_t kHidden = 2048;

constexpr layout::SymmetricShape symmetric(std::int64_t ranks) {
    return {kTokens, kTopK, kHidden, ranks, {Precision::kBf16}, false};
}

constexpr layout::WorkspaceShape workspace(std::int64_t ranks, std::int64_t pool_rows) {
    return {kTokens, kTopK, kExperts / ranks, ranks, pool_rows, kHidden, 0, {}, false};
}

constexpr std::int64_t whole_pool(std::int64_t ranks) {
    return layout::pad_rows(workspace(ranks, 0).largest_pool());
}

// Peers of one buffer must agree on these, so they are fixed here and not derived.
static_assert(layout::make_symmetric(symmetric(1)).total == 68683264);
static_assert(layout::make_symmetric(symmetric(8)).total == 605577728);
static_assert(layout::make_symmetric(symmetric(8))[layout::kStagedX] == 1581568);
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

// A layer whose x and h are e4m3.
void test_quantized() {
    for (const bool backward : {false, true}) {
        const auto mode = [&](Precision forward) {
            return backward ? Mode{forward, Precision::kBf16, Precision::kBf16} : Mode{forward};
        };
        layout::SymmetricShape s = symmetric(1);
        s.mode = mode(Precision::kBf16);
        const auto in_bf16 = layout::make_symmetric(s);
        s.mode = mode(Precision::kFp8);
        const auto in_e4m3 = layout::make_symmetric(s);
        CHECK(in_bf16.parts[layout::kStagedX].bytes == kTokens * kHidden * 2, "x in bf16");
        CHECK(in_e4m3.parts[layout::kStagedX].bytes == kTokens * kHidden * (backward ? 2 : 1), "x in e4m3");
        CHECK(in_bf16.parts[layout::kStagedScales].bytes == 0, "scale factors of x in bf16");
        CHECK(in_e4m3.parts[layout::kStagedScales].bytes == kTokens * kHidden / 128 * 4,
              "scale factors of x");

        layout::WorkspaceShape w = workspace(1, whole_pool(1));
        w.intermediate = 768;
        w.mode = mode(Precision::kBf16);
        const auto of_bf16 = layout::make_workspace(w);
        w.mode = mode(Precision::kFp8);
        const auto of_e4m3 = layout::make_workspace(w);
        check_parts(of_e4m3, false);
        const std::int64_t rows = w.pools() * w.pool_rows;
        const std::int64_t element = backward ? 2 : 1;
        CHECK(of_e4m3.parts[layout::kXPool].bytes == rows * kHidden * element, "x pool");
        CHECK(of_e4m3.parts[layout::kHPool].bytes == rows * 768 * element, "h pool");
        CHECK(of_e4m3.parts[layout::kOPool].bytes == of_bf16.parts[layout::kOPool].bytes, "o pool");
        CHECK(of_e4m3.parts[layout::kXScalePool].bytes == rows * kHidden / 128 * 4, "scale factors of x");
        CHECK(of_e4m3.parts[layout::kHScalePool].bytes == rows * 768 / 128 * 4, "scale factors of h");
        CHECK(of_bf16.parts[layout::kXScalePool].bytes == 0 && of_bf16.parts[layout::kHScalePool].bytes == 0,
              "scale factors without quantization");
    }
}

// The backward in fp8 has its pools last: nothing moves that the forward, or one in bf16, knows of.
void test_quantized_backward() {
    for (const Precision forward : {Precision::kBf16, Precision::kFp8}) {
        layout::WorkspaceShape w{
            256, 4, 8, 2, 1024, 1024, 768, {forward, Precision::kBf16, Precision::kBf16}, false};
        const auto plain = layout::make_workspace(w);
        w.mode.backward = Precision::kFp8;
        const auto wide = layout::make_workspace(w);
        for (int part = 0; part <= layout::kXScalePool; ++part)
            CHECK(wide[part] == plain[part], "part %d lies at %lld", part,
                  static_cast<long long>(wide[part]));
        const std::int64_t rows = w.pools() * w.pool_rows;
        const auto bytes = [&](layout::WorkspacePart part) { return wide.parts[part].bytes; };
        CHECK(bytes(layout::kXCodePool) == rows * 1024 && bytes(layout::kDyCodePool) == rows * 1024,
              "codes of x and dy");
        CHECK(bytes(layout::kDzCodePool) == rows * 2 * 768, "codes of dz");
        CHECK(bytes(layout::kXScalePool) == rows * 8 * 4 && bytes(layout::kDyScalePool) == rows * 8 * 4,
              "scale factors of x and dy");
        CHECK(bytes(layout::kDzScalePool) == rows * 12 * 4, "scale factors of dz");
    }
}

// Each scale factor of a pool has a place of its own, and those of a tile's rows and one k-block are one run.
void test_scale_runs() {
    for (const int groups : {1, 2, 6, 16}) {
        constexpr int kRows = 3 * layout::kTileRows;
        std::vector<int> seen(static_cast<std::size_t>(kRows * groups));
        for (int row = 0; row < kRows; ++row)
            for (int group = 0; group < groups; ++group) {
                const std::int64_t at = layout::scale_at(row, group, groups);
                CHECK(at >= 0 && at < kRows * groups, "row %d, group %d of %d", row, group, groups);
                ++seen[static_cast<std::size_t>(at)];
                const int first = row / layout::kTileRows * layout::kTileRows;
                CHECK(at == layout::scale_run(first, group, groups) * layout::kTileRows + row - first,
                      "row %d is not in its run", row);
            }
        for (const int count : seen)
            CHECK(count == 1, "%d scale factors at one place", count);
    }
    CHECK(layout::kRowScaleBytes == layout::kTileRows * 4, "a run");
}

// The buffers of x's scale factors alternate without a barrier of their own: a k-block is loaded when
// the one `stages` before it is released, and its scale factors must not take the place of some that are
// still read.
void test_scale_buffers() {
    constexpr int kStages = 4;
    for (const int hidden_blocks : {4, 8, 16, 56})
        for (const int intermediate_blocks : {1, 2, 5, 6, 12}) {
            int last_use[layout::kXScaleBuffers];
            for (int& use : last_use)
                use = -kStages;
            int next = 0;
            int k_block = 0;
            for (const char kind : {'u', 'u', 'd', 'u', 'd', 'd', 'd', 'u', 'u', 'u', 'd', 'u'}) {
                const bool down = kind == 'd';
                for (int i = 0; i < (down ? intermediate_blocks : hidden_blocks); ++i, ++k_block) {
                    if (!down && i % layout::kScaleBlocks == 0) {
                        next = (next + 1) % layout::kXScaleBuffers;
                        CHECK(last_use[next] <= k_block - kStages,
                              "scale factors of k-block %d are still read", last_use[next]);
                    }
                    if (!down) last_use[next] = k_block;
                }
            }
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
            w.mode = {Precision::kBf16};
            w.intermediate = 768;  // with pools, double buffered where there are several chunks
            check_parts(layout::make_workspace(w), canaries);
            w.pool_rows = layout::pad_rows(w.smallest_pool());
            CHECK(ranks > 8 || w.pools() == 2, "%lld pools", static_cast<long long>(w.pools()));
            check_parts(layout::make_workspace(w), canaries);
        }
    }
    test_quantized();
    test_quantized_backward();
    test_scale_runs();
    test_scale_buffers();
    test_chunks();
    test_work();
}
