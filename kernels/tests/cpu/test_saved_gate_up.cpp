#include <random>
#include <string>
#include <vector>

#include "cpu/check.h"
#include "layout/saved_gate_up.h"
#include "layout/tiles.h"

// Where gate and up are saved: each piece of 16 bytes once, and whatever the backward reads has been written.
namespace {

namespace layout = mega_moe::layout;

constexpr int kBlocks = 6;  // of 64 slots
constexpr int kColumns = 3;
constexpr std::int64_t kBytes = std::int64_t{kBlocks} * layout::kRowBlock * kColumns * 256 * 2;

// What is wrong, or nothing. `offset(slot, column, columns, warp, lane)`.
template <class Offset>
std::string wrong_offsets(const Offset& offset) {
    std::vector<int> seen(kBytes / 16);
    for (int block = 0; block < kBlocks; ++block)
        for (int column = 0; column < kColumns; ++column)
            for (int warp = 0; warp < 4; ++warp)
                for (int lane = 0; lane < 32; ++lane)
                    for (int i = 0; i < layout::kSavedVectors; ++i) {
                        const std::int64_t at =
                            offset(block * layout::kRowBlock, column, kColumns, warp, lane) +
                            i * layout::kSavedVectorBytes;
                        if (at < 0 || at % 16 != 0 || at >= kBytes) return "outside: " + std::to_string(at);
                        ++seen[static_cast<std::size_t>(at / 16)];
                    }
    for (std::size_t i = 0; i < seen.size(); ++i)
        if (seen[i] != 1) return std::to_string(i) + " is used " + std::to_string(seen[i]) + " times";
    return "";
}

// The forward decides by a CTA's tile, the backward for both CTAs of a cluster by the later one's.
template <class Reads>
std::string wrong_reads(int rows, int columns, int first_slot, int saved_slots, const Reads& reads) {
    for (int index = 0; index < layout::num_tiles(rows, columns); ++index) {
        if (!reads(first_slot + layout::cta_tile(index, 1, rows, columns).first_row, saved_slots)) continue;
        for (int cta = 0; cta < 2; ++cta) {
            const layout::CtaTile tile = layout::cta_tile(index, cta, rows, columns);
            if (!layout::is_saved(first_slot + tile.first_row, saved_slots))
                return "tile " + std::to_string(index) + " was not written";
            if (first_slot + tile.first_row + layout::kTileRows > saved_slots)
                return "tile " + std::to_string(index) + " ends outside";
        }
    }
    return "";
}

}  // namespace

void test_saved_gate_up() {
    CHECK(wrong_offsets(layout::saved_offset).empty(), "%s", wrong_offsets(layout::saved_offset).c_str());
    const auto one_column = [](int slot, int, int columns, int warp, int lane) {
        return layout::saved_offset(slot, 0, columns, warp, lane);
    };
    CHECK(!wrong_offsets(one_column).empty(), "a planted fault was not found: one column for all");
    // 2^31 bytes and more.
    const std::int64_t far = layout::saved_offset(1 << 20, 11, 12, 3, 31);
    CHECK(far == (((std::int64_t{1} << 14) * 12 + 11) * 4 + 3) * 8192 + 496, "%lld",
          static_cast<long long>(far));

    std::mt19937 made(5);
    for (int trial = 0; trial < 3000; ++trial) {
        const int rows = static_cast<int>(made() % 1500) + 1;
        const int first = static_cast<int>(made() % 4) * layout::kPadRows;
        const int saved = static_cast<int>(made() % 16) * layout::kTileRows;
        const std::string what = wrong_reads(rows, 1 + trial % 5, first, saved, layout::is_saved);
        CHECK(what.empty(), "%d rows from slot %d on, %d saved: %s", rows, first, saved, what.c_str());
    }
    const auto begins = [](int slot, int saved) { return slot < saved; };
    CHECK(!wrong_reads(700, 3, 0, 384 + 64, begins).empty(), "a planted fault was not found: half a tile");
}
