#include "cpu/check.h"
#include "cpu/forward_units.h"

// The order of tiles in the fused forward: each tile once, inputs before what reads them, and far enough
// before.
namespace {

namespace layout = mega_moe::layout;
using forward_units::Problem;
using layout::CtaTile;
using layout::TileRun;
using Runs = std::vector<TileRun>;

// Each returns what is wrong, or nothing.

// Every kTileRows rows of a unit meet every block of columns once, in tiles that the cluster can share.
template <class TileOf>
std::string wrong_tiles(int rows, int columns, const TileOf& tile_of) {
    constexpr int kHeight = layout::kTileRows;
    const int blocks = layout::ceil_div(rows, kHeight);
    std::vector<int> seen(static_cast<std::size_t>(blocks * columns));
    const int tiles = layout::num_tiles(rows, columns);
    for (int index = 0; index < tiles; ++index) {
        const CtaTile pair[2] = {tile_of(index, 0, rows, columns), tile_of(index, 1, rows, columns)};
        for (const CtaTile& tile : pair) {
            if (!tile.live) continue;
            if (tile.first_row < 0 || tile.first_row >= rows || tile.first_row % kHeight != 0 ||
                tile.column < 0 || tile.column >= columns)
                return "tile " + std::to_string(index) + " lies outside";
            ++seen[static_cast<std::size_t>(tile.first_row / kHeight * columns + tile.column)];
        }
        if (!pair[0].live) return "tile " + std::to_string(index) + ": the first CTA has none";
        if (pair[0].tail != pair[1].tail) return "tile " + std::to_string(index) + ": CTAs load differently";
        if (pair[0].tail
                ? pair[0].first_row != pair[1].first_row
                : pair[0].column != pair[1].column || pair[1].first_row != pair[0].first_row + kHeight)
            return "tile " + std::to_string(index) + ": CTAs share nothing";
        if (!pair[1].live && index != tiles - 1) return "tile " + std::to_string(index) + " is half empty";
    }
    for (std::size_t i = 0; i < seen.size(); ++i)
        if (seen[i] != 1)
            return "block " + std::to_string(i) + " is computed " + std::to_string(seen[i]) + " times";
    return "";
}

// Tickets follow one another; each unit with rows has one run of each product, the gate/up run first.
std::string wrong_runs(const Problem& p, const Runs& runs) {
    std::vector<int> gate_up(p.rows.counts.size()), down(p.rows.counts.size());
    int ticket = 0;
    for (const TileRun& run : runs) {
        const auto unit = static_cast<std::size_t>(run.unit);
        if (unit >= gate_up.size()) return "a run of no unit";
        if (run.first_ticket != ticket) return "tickets skip to " + std::to_string(run.first_ticket);
        if (run.rows != p.rows(run.unit)) return "a run of other rows";
        if (run.tiles != layout::num_tiles(run.rows, run.down ? p.down_columns : p.gate_up_columns))
            return "a run of other tiles";
        ticket += run.tiles;
        ++(run.down ? down : gate_up)[unit];
        if (run.down && gate_up[unit] == 0)
            return "unit " + std::to_string(run.unit) + " starts with its end";
    }
    for (std::size_t unit = 0; unit < gate_up.size(); ++unit) {
        const int want = p.rows.counts[unit] > 0 ? 1 : 0;
        if (gate_up[unit] != want || down[unit] != want)
            return "unit " + std::to_string(unit) + " has " + std::to_string(gate_up[unit]) + " and " +
                   std::to_string(down[unit]) + " runs";
    }
    return "";
}

// Between a unit's two runs lie `lag` gate/up tiles of others, where there are any that may start; and no
// more units than that takes, since their weights and activations are to stay in L2.
std::string wrong_lag(const Problem& p, const Runs& runs) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
        if (!runs[i].down) continue;
        std::size_t own = 0;
        while (runs[own].down || runs[own].unit != runs[i].unit)
            ++own;
        int between = 0;
        int last = 0;
        for (std::size_t j = own + 1; j < i; ++j) {
            if (runs[j].down) continue;
            last = runs[j].tiles;
            between += last;
        }
        std::size_t next = i;
        while (next < runs.size() && runs[next].down)
            ++next;
        const bool more = next < runs.size() && p.chunk_of(runs[next].unit) <= p.chunk_of(runs[i].unit) + 1;
        if (between < p.lag && more) return "unit " + std::to_string(runs[i].unit) + " has too short a lag";
        if (i > own + 1 && !runs[i - 1].down && between - last >= p.lag)
            return "unit " + std::to_string(runs[i].unit) + " waits for more than its lag";
    }
    return "";
}

// Rows of chunk c + 2 lie where those of chunk c lay.
std::string wrong_chunks(const Problem& p, const Runs& runs) {
    int newest = 0;
    for (const TileRun& run : runs) {
        const int chunk = p.chunk_of(run.unit);
        if (chunk + 2 <= newest) return "chunk " + std::to_string(chunk) + " after " + std::to_string(newest);
        newest = std::max(newest, chunk);
    }
    return "";
}

std::string wrong(const Problem& p, const Runs& runs) {
    for (const auto& check : {wrong_runs, wrong_lag, wrong_chunks}) {
        const std::string what = check(p, runs);
        if (!what.empty()) return what;
    }
    return "";
}

void expect_found(const char* fault, const std::string& what) {
    CHECK(!what.empty(), "a planted fault was not found: %s", fault);
}

void test_tiles_of_a_unit() {
    std::mt19937 made(1);
    for (const int columns : {1, 2, 3, 5, 8, 11, 12, 24, 28})
        for (int rows = 1; rows < 4400; rows += rows < 1200 ? 1 : 61) {
            const std::string what = wrong_tiles(rows, columns, layout::cta_tile);
            CHECK(what.empty(), "%d rows, %d columns: %s", rows, columns, what.c_str());
        }
    CHECK(layout::num_tiles(0, 12) == 0, "an empty unit has %d tiles", layout::num_tiles(0, 12));
    CHECK(layout::num_tiles(1 << 24, 128) == 1 << 23, "got %d", layout::num_tiles(1 << 24, 128));
    const auto late = [](int index, int cta, int rows, int columns) {
        CtaTile tile = layout::cta_tile(index, cta, rows, columns);
        if (!tile.tail) tile.first_row += layout::kTileRows;
        return tile;
    };
    const auto no_tail = [](int index, int cta, int rows, int columns) {
        CtaTile tile = layout::cta_tile(index, cta, rows, columns);
        if (tile.tail) tile.column = 0;
        return tile;
    };
    expect_found("rows one block too late", wrong_tiles(1280, 3, late));
    expect_found("a tail of one column", wrong_tiles(384, 4, no_tail));
    expect_found("a tail of one column", wrong_tiles(64, 4, no_tail));
}

Problem random_problem(std::mt19937& made) {
    const auto pick = [&](auto... values) {
        const int all[] = {values...};
        return all[std::uniform_int_distribution<std::size_t>(0, std::size(all) - 1)(made)];
    };
    Problem p{};
    p.num_local = pick(1, 2, 3, 16, 48, 128, 384);
    p.chunks = pick(1, 1, 2, 3, 4, 9);
    p.gate_up_columns = pick(1, 3, 5, 6, 11, 12);
    p.down_columns = pick(1, 2, 3, 8, 16, 28);
    p.clusters = pick(1, 2, 8, 33, 66);
    p.lag = pick(0, 1, 3) * p.clusters;
    p.rows = forward_units::random_rows(forward_units::kKinds[std::uniform_int_distribution<std::size_t>(
                                            0, std::size(forward_units::kKinds) - 1)(made)],
                                        p.chunks * p.num_local, made);
    return p;
}

void test_runs() {
    std::mt19937 made(2);
    for (int trial = 0; trial < 4000; ++trial) {
        const Problem p = random_problem(made);
        const std::string what = wrong(p, forward_units::runs_of(p));
        CHECK(what.empty(), "trial %d, %s: %s", trial, p.name().c_str(), what.c_str());
    }
    Problem none{};
    none.num_local = 4;
    none.gate_up_columns = none.down_columns = 1;
    CHECK(forward_units::runs_of(none).empty(), "no chunk has runs");
}

// The checks above, on orders that are wrong.
void test_planted_faults() {
    Problem p{2, 4, 4, 4, 2, 6, {{300, 200, 300, 0, 100, 300, 500, 1}}};
    const Runs right = forward_units::runs_of(p);
    CHECK(wrong(p, right).empty(), "%s", wrong(p, right).c_str());
    const auto renumber = [](Runs runs) {
        int ticket = 0;
        for (TileRun& run : runs) {
            run.first_ticket = ticket;
            ticket += run.tiles;
        }
        return runs;
    };
    Runs runs = right;
    runs.pop_back();
    expect_found("the last run is missing", wrong(p, runs));
    runs = right;
    runs.push_back(right.back());
    expect_found("a run twice", wrong(p, renumber(runs)));
    runs = right;
    runs[1].first_ticket += 1;
    expect_found("a ticket left out", wrong(p, runs));
    runs = right;
    std::reverse(runs.begin(), runs.end());
    expect_found("the end first", wrong(p, renumber(runs)));
    runs = right;
    std::stable_sort(runs.begin(), runs.end(),
                     [](const TileRun& a, const TileRun& b) { return a.unit < b.unit; });
    expect_found("no lag", wrong(p, renumber(runs)));
    runs = right;
    std::stable_sort(runs.begin(), runs.end(),
                     [](const TileRun& a, const TileRun& b) { return a.down < b.down; });
    expect_found("all gate/up tiles first", wrong(p, renumber(runs)));
    expect_found("all gate/up tiles first, by chunks alone", wrong_chunks(p, renumber(runs)));
}

}  // namespace

void test_forward_tiles() {
    test_tiles_of_a_unit();
    test_runs();
    test_planted_faults();
}
