#pragma once
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "layout/tiles.h"

// Rows of experts in chunks, and the runs of tiles that the schedule makes of them.
namespace forward_units {

namespace layout = mega_moe::layout;

// What a walk asks of the rows of all units, as layout/tiles.h states it.
struct Rows {
    std::vector<int> counts;  // [chunks * num_local]

    int operator()(int unit) const { return counts[static_cast<std::size_t>(unit)]; }
    int next(int unit) const {
        while (unit < size() && (*this)(unit) == 0)
            ++unit;
        return unit;
    }
    int size() const { return static_cast<int>(counts.size()); }
};

struct Problem {
    int num_local;
    int chunks;
    int gate_up_columns;
    int down_columns;
    int clusters;
    int lag;
    Rows rows;

    int chunk_of(int unit) const { return unit / num_local; }
    std::string name() const {
        return std::to_string(chunks) + " chunks of " + std::to_string(num_local) + " experts, columns " +
               std::to_string(gate_up_columns) + " and " + std::to_string(down_columns) + ", " +
               std::to_string(clusters) + " clusters, lag " + std::to_string(lag);
    }
};

inline std::vector<layout::TileRun> runs_of(const Problem& p) {
    layout::TileWalk walk(p.rows.size(), p.num_local, p.gate_up_columns, p.down_columns, p.lag);
    std::vector<layout::TileRun> runs;
    for (;;) {
        const layout::TileRun run = walk.next(p.rows);
        if (run.tiles == 0) break;
        runs.push_back(run);
        // More than there can be: a walk that never ends.
        if (runs.size() > 2 * p.rows.counts.size()) break;
    }
    return runs;
}

enum class Kind { kSmall, kEdges, kMixed, kOne, kSparse, kNone, kThousands };
inline constexpr Kind kKinds[] = {Kind::kSmall,  Kind::kEdges, Kind::kMixed,    Kind::kOne,
                                  Kind::kSparse, Kind::kNone,  Kind::kThousands};

inline Rows random_rows(Kind kind, int units, std::mt19937& made) {
    static constexpr int kEdges[] = {0,   1,   63,  64,  65,   127,  128,  129,  191,  192,
                                     193, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2047};
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(made); };
    Rows rows{std::vector<int>(static_cast<std::size_t>(units))};
    for (int& count : rows.counts) {
        const int edge = kEdges[draw(0, static_cast<int>(std::size(kEdges)) - 1)];
        switch (kind) {
            case Kind::kSmall:
                count = draw(0, 130);
                break;
            case Kind::kEdges:
                count = edge;
                break;
            case Kind::kMixed:
                count = draw(0, 3) == 0 ? draw(0, 3000) : edge;
                break;
            case Kind::kOne:
                count = 0;
                break;
            case Kind::kSparse:
                count = draw(0, 9) == 0 ? draw(1, 400) : 0;
                break;
            case Kind::kNone:
                count = 0;
                break;
            case Kind::kThousands:
                count = draw(1000, 9000);
                break;
        }
    }
    if (kind == Kind::kOne && units > 0)
        rows.counts[static_cast<std::size_t>(draw(0, units - 1))] = draw(1, 70000);
    return rows;
}

}  // namespace forward_units
