#include <map>
#include <tuple>

#include "cpu/check.h"
#include "cpu/forward_units.h"
#include "layout/gradients.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

// The order of the tiles of the weights' gradients: each row of each expert once in each tile, parts in one
// order, and zeros for experts without rows.
namespace {

namespace layout = mega_moe::layout;
using forward_units::Rows;
using layout::GradientRun;
using Runs = std::vector<GradientRun>;

struct Problem {
    int chunks;
    int num_local;
    int tiles;
    bool zeros;
    Rows rows;

    std::string name() const {
        return std::to_string(chunks) + " chunks of " + std::to_string(num_local) + " experts, " +
               std::to_string(tiles) + " tiles" + (zeros ? "" : ", no zeros");
    }
};

Runs runs_of(const Problem& p) {
    layout::GradientWalk walk(p.chunks, p.num_local, p.tiles, p.zeros);
    Runs runs;
    for (;;) {
        const GradientRun run = walk.next(p.rows);
        if (run.tiles == 0) break;
        runs.push_back(run);
        if (runs.size() > 100 * p.rows.counts.size()) break;  // a walk that never ends
    }
    return runs;
}

// What is wrong, or nothing.
std::string wrong(const Problem& p, const Runs& runs) {
    std::vector<int> next_ordinal(static_cast<std::size_t>(p.num_local));
    std::vector<int> next_row(p.rows.counts.size());
    std::vector<bool> ended(static_cast<std::size_t>(p.num_local));
    std::map<int, int> partial_of;  // experts by their sums between parts
    int ticket = 0;
    int unit = 0;
    for (const GradientRun& run : runs) {
        const std::string name = "unit " + std::to_string(run.unit);
        const auto expert = static_cast<std::size_t>(run.unit % p.num_local);
        if (run.first_ticket != ticket || run.tiles != p.tiles) return name + ": tickets";
        ticket += run.tiles;
        if (run.unit < unit) return name + " comes late";
        unit = run.unit;
        if (ended[expert]) return name + " goes on after its last part";
        if (run.ordinal != next_ordinal[expert]++) return name + ": ordinal";
        int& row = next_row[static_cast<std::size_t>(run.unit)];
        if (run.first_row != row || run.rows > layout::kPartRows) return name + ": rows";
        if (run.first_row % layout::kRowBlock != 0) return name + " starts within a block";
        row += run.rows;
        ended[expert] = run.last;
        if (run.rows == 0 && !(run.last && run.ordinal == 0 && p.zeros)) return name + " sums nothing";
        if (run.last && run.ordinal == 0) continue;
        const auto [at, fresh] = partial_of.emplace(run.partial, static_cast<int>(expert));
        if (at->second != static_cast<int>(expert)) return name + " shares its sums with another";
        static_cast<void>(fresh);
    }
    std::int64_t all = 0;
    for (const int count : p.rows.counts)
        all += count;
    const std::int64_t most = layout::max_partials(all, p.chunks, p.num_local);
    for (const auto& [partial, expert] : partial_of)
        if (partial < 0 || partial >= most)
            return "expert " + std::to_string(expert) + " has no place for its sums";
    for (std::size_t i = 0; i < next_row.size(); ++i)
        if (p.tiles > 0 && next_row[i] != p.rows.counts[i])
            return "unit " + std::to_string(i) + " is not all summed";
    for (int expert = 0; expert < p.num_local; ++expert) {
        bool any = p.zeros;
        for (int chunk = 0; chunk < p.chunks; ++chunk)
            any = any || p.rows(chunk * p.num_local + expert) > 0;
        if (p.tiles > 0 && p.chunks > 0 && ended[static_cast<std::size_t>(expert)] != any)
            return "expert " + std::to_string(expert) + (any ? " has no end" : " is computed");
    }
    return "";
}

Problem random_problem(std::mt19937& made) {
    const auto pick = [&](auto... values) {
        const int all[] = {values...};
        return all[std::uniform_int_distribution<std::size_t>(0, std::size(all) - 1)(made)];
    };
    Problem p{pick(1, 1, 2, 3, 9), pick(1, 2, 3, 16, 48, 128), pick(0, 1, 3, 72, 288), pick(0, 1) == 1, {}};
    p.rows = forward_units::random_rows(forward_units::kKinds[std::uniform_int_distribution<std::size_t>(
                                            0, std::size(forward_units::kKinds) - 1)(made)],
                                        p.chunks * p.num_local, made);
    // Experts with several parts in one chunk.
    for (int i = pick(0, 0, 1, 3); i > 0; --i)
        p.rows.counts[made() % p.rows.counts.size()] =
            pick(layout::kPartRows, layout::kPartRows + 1, 3 * layout::kPartRows, 70001);
    return p;
}

void test_parts() {
    std::mt19937 made(3);
    for (int trial = 0; trial < 3000; ++trial) {
        const Problem p = random_problem(made);
        const std::string what = wrong(p, runs_of(p));
        CHECK(what.empty(), "trial %d, %s: %s", trial, p.name().c_str(), what.c_str());
    }
}

// Each 128 x 256 of both gradients once; the two CTAs of a cluster read the same columns.
void test_tiles() {
    for (const int hidden : {256, 2048, 4096, 7168})
        for (const int intermediate : {128, 256, 640, 768, 1536})
            for (int wanted = 0; wanted < 4; ++wanted) {
                const layout::GradientTiles g{hidden, intermediate, (wanted & 1) != 0, (wanted & 2) != 0};
                std::map<std::tuple<bool, int, int>, int> seen;
                for (int index = 0; index < g.tiles(); ++index) {
                    const layout::GradientTile pair[2] = {layout::gradient_tile(g, index, 0),
                                                          layout::gradient_tile(g, index, 1)};
                    CHECK(pair[0].column == pair[1].column && pair[0].down == pair[1].down &&
                              pair[1].row == pair[0].row + 128,
                          "tile %d: CTAs share nothing", index);
                    for (const layout::GradientTile& tile : pair) {
                        CHECK(tile.row >= 0 && tile.row < (tile.down ? hidden : 2 * intermediate) &&
                                  tile.column >= 0 && tile.column < (tile.down ? intermediate : hidden),
                              "tile %d lies outside", index);
                        ++seen[{tile.down, tile.row, tile.column}];
                    }
                }
                std::size_t want = 0;
                if (g.gate_up) want += static_cast<std::size_t>(2 * intermediate / 128 * (hidden / 256));
                if (g.down) want += static_cast<std::size_t>(hidden / 128 * ((intermediate + 255) / 256));
                CHECK(seen.size() == want, "%zu tiles of %d x %d, want %zu", seen.size(), hidden,
                      intermediate, want);
                for (const auto& [tile, count] : seen)
                    CHECK(count == 1, "a tile is computed %d times", count);
                CHECK(layout::all_gradient_tiles(hidden, intermediate) >= g.tiles(), "parts");
            }
}

// The checks above, on orders that are wrong.
void test_planted_faults() {
    const Problem p{2, 3, 4, true, {{300, 0, 3 * layout::kPartRows, 100, 0, 7}}};
    const Runs right = runs_of(p);
    CHECK(wrong(p, right).empty(), "%s", wrong(p, right).c_str());
    CHECK(right.size() == 7, "%zu runs", right.size());
    const auto expect_found = [&](const char* fault, Runs runs) {
        int ticket = 0;
        for (GradientRun& run : runs) {
            run.first_ticket = ticket;
            ticket += run.tiles;
        }
        CHECK(!wrong(p, runs).empty(), "a planted fault was not found: %s", fault);
    };
    Runs runs = right;
    runs.pop_back();
    expect_found("a part is missing", runs);
    runs = right;
    std::swap(runs[2], runs[3]);
    expect_found("parts change places", runs);
    runs = right;
    runs[2].last = true;
    expect_found("an early end", runs);
    runs = right;
    runs[0].partial = runs[2].partial;
    expect_found("two experts in one place", runs);
}

// What training holds at most, at 16384 tokens on each of 8 ranks with pools of a half and a sixteenth more.
void test_memory() {
    const auto total = [](std::int64_t hidden, std::int64_t intermediate) {
        const std::int64_t rows = 17 * 16384 * 8 / 32 + 128 * 16;
        constexpr auto kBf16 = mega_moe::Precision::kBf16;
        constexpr mega_moe::Mode kTraining{kBf16, kBf16, kBf16};
        const layout::SymmetricShape s{16384, 8, hidden, 8, kTraining, false};
        const layout::WorkspaceShape w{16384, 8, 16, 8, rows, hidden, intermediate, kTraining, false};
        return layout::make_symmetric(s).total + layout::make_workspace(w).total;
    };
    constexpr std::int64_t kGiB = std::int64_t{1} << 30;
    std::printf("training, 8 ranks: %.2f and %.2f GiB\n", static_cast<double>(total(2048, 768)) / kGiB,
                static_cast<double>(total(4096, 1536)) / kGiB);
    CHECK(total(2048, 768) <= 9 * kGiB / 2, "%lld bytes", static_cast<long long>(total(2048, 768)));
    CHECK(total(4096, 1536) <= 9 * kGiB, "%lld bytes", static_cast<long long>(total(4096, 1536)));
}

}  // namespace

void test_gradient_tiles() {
    test_parts();
    test_tiles();
    test_planted_faults();
    test_memory();
}
