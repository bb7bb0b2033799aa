#include "layout/gradient_operands.h"

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/check.h"
#include "layout/tiles.h"
#include "layout/workspace.h"

// The operands of the weights' gradients in e4m3: where codes and scale factors lie, and the tiles that
// transpose x and dy.
namespace {

namespace layout = mega_moe::layout;
using mega_moe::Precision;
constexpr int kEdge = layout::kTransposedEdge;

// Each code has a place of its own in its block. A row's slab is one piece of memory, in which 8 columns are
// a core matrix of wgmma: 8 rows of 16 bytes, one after another.
void test_places() {
    for (const int columns : {128, 256, 640}) {
        constexpr int kRows = 2 * kEdge;
        std::vector<int> seen(static_cast<std::size_t>(kRows * columns));
        for (int row = 0; row < kRows; ++row)
            for (int column = 0; column < columns; ++column) {
                const std::int64_t at = layout::transposed_at(row, column, columns);
                CHECK(at >= 0 && at < kRows * columns, "row %d, column %d lie outside", row, column);
                ++seen[static_cast<std::size_t>(at)];
                const std::int64_t block = layout::transposed_block(row, column, columns);
                CHECK(block % layout::kTransposedBytes == 0 && at - block < layout::kTransposedBytes,
                      "row %d, column %d lie in another block", row, column);
                const std::int64_t slab = (at - block) / layout::kSlabBytes;
                CHECK(slab == row % kEdge / layout::kSlabRows, "row %d lies in slab %d", row,
                      static_cast<int>(slab));
                const std::int64_t next = layout::transposed_at(row, column + 1, columns);
                CHECK(column % kEdge == kEdge - 1 || next == at + layout::kSlabRows, "column %d", column);
            }
        for (const int count : seen)
            CHECK(count == 1, "%d codes at one place", count);
    }
    // What a thread packs side by side: rows r and r + 8.
    for (int row = 0; row < 8; ++row)
        CHECK(layout::place_in_slab(row + 8) == layout::place_in_slab(row) + 1 &&
                  layout::place_in_slab(row) == 2 * row,
              "row %d", row);
}

// Copies of 512 and of 16 bytes start where they may, and no two scale factors share a place.
void test_scales() {
    for (const int hidden : {256, 2048, 4096, 7168})
        for (const int intermediate : {128, 640, 768, 1536}) {
            const layout::GradientScales s{hidden, intermediate};
            CHECK(s.length() % 4 == 0, "%d scale factors of 128 rows", s.length());
            std::set<int> seen;
            const auto take = [&](int at) {
                CHECK(at >= 0 && at < s.length() && seen.insert(at).second, "scale factor %d", at);
            };
            for (int i = 0; i < 2 * intermediate; ++i)
                take(s.dz() + i);
            for (int i = 0; i < hidden; ++i)
                take(s.dy() + i);
            for (int i = 0; i < hidden / kEdge; ++i)
                take(s.x() + layout::GradientScales::of_block(i));
            for (int i = 0; i < intermediate / kEdge; ++i)
                take(s.h() + layout::GradientScales::of_block(i));
            for (const int first : {s.dz(), s.dy(), s.x(), s.h()})
                CHECK(first % 4 == 0, "scale factors from %d on", first);
            for (int tile = 0; tile < intermediate; tile += 256)
                CHECK(layout::GradientScales::of_block(tile / kEdge) % 4 == 0, "those of a tile");
        }
}

// Each block of what is wanted once, whatever the number of rows; both CTAs of a cluster go through as many
// stages.
void test_tiles() {
    for (const int hidden : {256, 512, 768, 2048, 2304})
        for (int wanted = 0; wanted < 4; ++wanted)
            for (const int rows : {1, 64, 128, 129, 256, 300, 1000}) {
                const layout::TransposeTiles t{hidden, (wanted & 1) != 0, (wanted & 2) != 0};
                std::set<std::tuple<int, bool, int>> seen;
                for (int index = 0; index < layout::num_tiles(rows, t.columns()); ++index)
                    for (int cta = 0; cta < 2; ++cta) {
                        const layout::CtaTile tile = layout::cta_tile(index, cta, rows, t.columns());
                        if (!tile.live) continue;
                        for (int block = 0; block < t.blocks(); ++block) {
                            const int column = t.first_column(tile.column) + block * kEdge;
                            CHECK(column < hidden, "column %d of %d", column, hidden);
                            CHECK(seen.insert({tile.first_row, t.is_dy(tile.column), column}).second,
                                  "rows %d, column %d are transposed twice", tile.first_row, column);
                        }
                    }
                const int blocks = (rows + kEdge - 1) / kEdge * (hidden / kEdge);
                const std::size_t want = static_cast<std::size_t>(blocks * (int{t.x} + int{t.dy}));
                CHECK(seen.size() == want, "%zu blocks of %d x %d, want %zu", seen.size(), rows, hidden,
                      want);
                for (const auto& [row, dy, column] : seen)
                    CHECK(dy ? t.dy : t.x, "what nobody wants is transposed");
            }
}

// The pools are last, so that nothing moves that another form knows of, but for those that hold codes
// instead of bf16.
void test_pools() {
    for (const Precision forward : {Precision::kBf16, Precision::kFp8}) {
        layout::WorkspaceShape w{256,  4, 8, 2, 1024, 1024, 768, {forward, Precision::kFp8, Precision::kBf16},
                                 false};
        const auto plain = layout::make_workspace(w);
        const std::int64_t counters = w.counters();
        w.mode.wgrad = Precision::kFp8;
        const auto codes = layout::make_workspace(w);
        CHECK(w.counter_of_transposed() == counters &&
                  w.counters() == counters + layout::num_row_blocks(w.max_slots()),
              "counters");
        const std::int64_t rows = w.pools() * w.pool_rows;
        const auto bytes = [&](layout::WorkspacePart part) { return codes.parts[part].bytes; };
        CHECK(
            bytes(layout::kXTransposedPool) == rows * 1024 && bytes(layout::kDyTransposedPool) == rows * 1024,
            "codes of x and dy");
        CHECK(bytes(layout::kDzPool) == rows * 2 * 768, "codes of dz");
        // The forward keeps h there in its own dtype.
        CHECK(bytes(layout::kHPool) == rows * 768 * (forward == Precision::kFp8 ? 1 : 2), "codes of h");
        CHECK(bytes(layout::kGradientScalePool) == rows / kEdge * w.gradient_scales().length() * 4,
              "scale factors");
        for (const int part : {layout::kXPool, layout::kDyPool, layout::kOPool, layout::kDzCodePool})
            CHECK(codes.parts[part].bytes == plain.parts[part].bytes, "part %d", part);
    }
}

}  // namespace

void test_gradient_operands() {
    test_places();
    test_scales();
    test_tiles();
    test_pools();
}
