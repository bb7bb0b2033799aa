#include <functional>
#include <numeric>

#include "cpu/check.h"
#include "cpu/forward_units.h"
#include "layout/gradients.h"
#include "layout/layer_shared.h"

// The roles of one rank's backward as they wait for one another, in every order that a scheduler of ours
// thinks of: they always end, whichever kind of tile a cluster takes, parts of a sum are added in their
// order, and no row is overwritten before its last reader is through.
namespace {

namespace layout = mega_moe::layout;
using forward_units::Problem;
using layout::GradientRun;
using layout::TileRun;

struct Settings {
    bool needs_dx;
    bool zeros;
    int gradient_tiles;
    int pullers;
    int ahead;     // tiles that a cluster takes before it has stored them
    bool spreads;  // rows come to their codes' readers first, then to the gradients
    unsigned seed;
    // Planted: 1 parts in any order, 2 pulls that wait for sums alone, 3 gradients that wait once taken, 4
    // gradients that wait for dz alone, 5 gradients that do not wait for transposed rows, 6 tiles that
    // transpose and wait for the codes of their rows.
    int fault = 0;
    int transposes = 0;  // columns of the tiles that transpose rows, which gradients then wait for
};

// Blocks of 128 rows stand for rows: of each unit, in the order of its slots.
class Rank {
  public:
    Rank(const Problem& p, const Settings& s) : p_(p), s_(s) {
        for (int unit = 0; unit < p.rows.size(); ++unit) {
            first_block_.push_back(static_cast<int>(block_unit_.size()));
            for (int row = 0; row < p.rows(unit); row += layout::kTileRows)
                block_unit_.push_back(unit);
        }
        first_block_.push_back(static_cast<int>(block_unit_.size()));
        arrived_.resize(block_unit_.size());
        spread_.resize(block_unit_.size());
        dz_.resize(block_unit_.size());
        transposed_.resize(block_unit_.size());
        dx_.resize(block_unit_.size());
        pushed_.resize(block_unit_.size());
        const auto chunks = static_cast<std::size_t>(p.chunks);
        blocks_.resize(chunks);
        sent_.resize(chunks);
        gradients_.resize(chunks);
        gradients_wanted_.resize(chunks);
        for (const int unit : block_unit_)
            ++blocks_[chunk(unit)];
        cut_rows();
        if (s.transposes > 0 && s.gradient_tiles > 0) cut_transposes();
        cut_gradients();
        turns_.resize(static_cast<std::size_t>(p.num_local * s.gradient_tiles));
        clusters_.resize(static_cast<std::size_t>(p.clusters));
        for (std::size_t i = 0; i < clusters_.size(); ++i) {
            roles_.emplace_back([this, i] { return try_take(clusters_[i]); });
            roles_.emplace_back([this, i] { return try_store(clusters_[i]); });
        }
        pulled_.resize(static_cast<std::size_t>(s.pullers));
        for (std::size_t i = 0; i < pulled_.size(); ++i) {
            pulled_[i] = {0, i, false};
            roles_.emplace_back([this, i] { return try_pull(pulled_[i]); });
        }
        roles_.emplace_back([this] { return try_push(); });
    }

    // What went wrong, or nothing.
    std::string run() {
        std::mt19937 made(s_.seed);
        std::vector<std::size_t> order(roles_.size());
        std::iota(order.begin(), order.end(), 0);
        for (long step = 0;; ++step) {
            // The first of a random order that can go on does, over and over: others starve until it is held
            // back.
            if (step % 37 == 0) std::shuffle(order.begin(), order.end(), made);
            bool moved = false;
            for (const std::size_t role : order) {
                moved = roles_[role]();
                if (!fault_.empty()) return fault_;
                if (moved) break;
            }
            if (!moved) break;
        }
        for (std::size_t c = 0; c < blocks_.size(); ++c)
            if (sent_[c] != blocks_[c] || gradients_[c] != gradients_wanted_[c])
                return "nothing moves, and chunk " + std::to_string(c) + " is not through";
        for (std::size_t i = 0; i < left_.size(); ++i)
            if (left_[i] != 0) return "a tile of unit " + std::to_string(i) + " was never computed";
        return zeros_ == zeros_wanted_ ? "" : "zeros are missing";
    }

  private:
    struct RowTile {
        bool down;
        std::vector<int> blocks;
    };
    enum Kind { kRow, kTranspose, kGradient };
    struct Gradient {
        GradientRun run;
        int index;
    };
    struct Cluster {
        int row = -1;  // tickets that it holds
        int transpose = -1;
        int gradient = -1;
        std::vector<std::pair<Kind, int>> taken;  // tiles on their way
    };
    struct Share {
        int chunk;
        std::size_t at;
        bool spreading;
    };

    std::size_t chunk(int unit) const { return static_cast<std::size_t>(p_.chunk_of(unit)); }

    void cut_rows() {
        left_.resize(static_cast<std::size_t>(p_.rows.size()));
        Problem p = p_;
        if (!s_.needs_dx) p.down_columns = 0;
        layout::TileWalk walk(p.rows.size(), p.num_local, p.gate_up_columns, p.down_columns, p.lag);
        for (;;) {
            const TileRun run = walk.next(p.rows);
            if (run.tiles == 0 && run.rows == 0) break;
            for (int index = 0; index < run.tiles; ++index) {
                RowTile tile{run.down, {}};
                for (int cta = 0; cta < 2; ++cta) {
                    const layout::CtaTile part =
                        layout::cta_tile(index, cta, run.rows, run.down ? p.down_columns : p.gate_up_columns);
                    if (part.live)
                        tile.blocks.push_back(first_block_[static_cast<std::size_t>(run.unit)] +
                                              part.first_row / layout::kTileRows);
                }
                left_[static_cast<std::size_t>(run.unit)] += static_cast<int>(tile.blocks.size());
                row_tiles_.push_back(tile);
            }
        }
    }
    void cut_transposes() {
        layout::TileWalk walk(p_.rows.size(), p_.num_local, s_.transposes, 0, 0);
        for (;;) {
            const TileRun run = walk.next(p_.rows);
            if (run.tiles == 0 && run.rows == 0) break;
            for (int index = 0; index < run.tiles; ++index) {
                RowTile tile{false, {}};
                for (int cta = 0; cta < 2; ++cta) {
                    const layout::CtaTile part = layout::cta_tile(index, cta, run.rows, s_.transposes);
                    if (part.live)
                        tile.blocks.push_back(first_block_[static_cast<std::size_t>(run.unit)] +
                                              part.first_row / layout::kTileRows);
                }
                left_[static_cast<std::size_t>(run.unit)] += static_cast<int>(tile.blocks.size());
                transposes_.push_back(tile);
            }
        }
    }
    void cut_gradients() {
        layout::GradientWalk walk(p_.chunks, p_.num_local, s_.gradient_tiles, s_.zeros);
        for (;;) {
            const GradientRun run = walk.next(p_.rows);
            if (run.tiles == 0) break;
            (run.rows > 0 ? gradients_wanted_[chunk(run.unit)] : zeros_wanted_) += run.tiles;
            for (int index = 0; index < run.tiles; ++index)
                gradient_tiles_.push_back({run, index});
        }
    }

    bool ready(const RowTile& tile) const {
        for (const int block : tile.blocks) {
            const auto b = static_cast<std::size_t>(block);
            if (tile.down ? dz_[b] < p_.gate_up_columns : arrived_[b] == 0) return false;
        }
        return true;
    }
    int& turn(const Gradient& g) {
        return turns_[static_cast<std::size_t>(g.run.unit % p_.num_local * s_.gradient_tiles + g.index)];
    }
    bool ready(const Gradient& g) {
        const int first =
            first_block_[static_cast<std::size_t>(g.run.unit)] + g.run.first_row / layout::kTileRows;
        for (int row = 0; row < g.run.rows; row += layout::kTileRows) {
            const int block = first + row / layout::kTileRows;
            const auto b = static_cast<std::size_t>(block);
            if (dz_[b] < p_.gate_up_columns) return false;
            if (s_.transposes > 0) {
                if (transposed_[b] < s_.transposes && s_.fault != 5) return false;
            } else if (s_.fault != 4 && !is_spread(block)) {
                return false;
            }
        }
        return s_.fault == 1 || turn(g) >= g.run.ordinal;
    }

    bool is_spread(int block) const { return !s_.spreads || spread_[static_cast<std::size_t>(block)] != 0; }

    bool try_take(Cluster& c) {
        if (static_cast<int>(c.taken.size()) >= s_.ahead) return false;
        if (c.row < 0) c.row = next_row_++;
        const bool has_row = c.row < static_cast<int>(row_tiles_.size());
        if (has_row && ready(row_tiles_[static_cast<std::size_t>(c.row)])) {
            c.taken.emplace_back(kRow, c.row);
            c.row = -1;
            return true;
        }
        if (c.transpose < 0) c.transpose = next_transpose_++;
        if (c.transpose < static_cast<int>(transposes_.size()) &&
            arrived(transposes_[static_cast<std::size_t>(c.transpose)])) {
            c.taken.emplace_back(kTranspose, c.transpose);
            c.transpose = -1;
            return true;
        }
        if (c.gradient < 0) c.gradient = next_gradient_++;
        if (c.gradient >= static_cast<int>(gradient_tiles_.size())) return false;
        const Gradient& next = gradient_tiles_[static_cast<std::size_t>(c.gradient)];
        if (s_.fault != 3 && !ready(next)) return false;
        c.taken.emplace_back(kGradient, c.gradient);
        c.gradient = -1;
        return true;
    }
    bool try_store(Cluster& c) {
        if (c.taken.empty()) return false;
        const auto [kind, at] = c.taken.front();
        if (!try_finish(kind, at)) return false;
        c.taken.erase(c.taken.begin());
        return true;
    }
    bool try_finish(Kind kind, int at) {
        if (kind == kGradient) {
            const Gradient& g = gradient_tiles_[static_cast<std::size_t>(at)];
            if (s_.fault == 3 && !ready(g)) return false;
            check_read(g);
            if (turn(g) != g.run.ordinal) fault_ = "parts are added in another order";
            ++turn(g);
            ++(g.run.rows > 0 ? gradients_[chunk(g.run.unit)] : zeros_);
            return true;
        }
        const RowTile& tile = (kind == kRow ? row_tiles_ : transposes_)[static_cast<std::size_t>(at)];
        for (const int block : tile.blocks) {
            const auto b = static_cast<std::size_t>(block);
            check_free(chunk(block_unit_[b]));
            if (kind == kTranspose && !is_spread(block)) fault_ = "rows are transposed that are not there";
            ++(kind == kTranspose ? transposed_ : tile.down ? dx_ : dz_)[b];
            --left_[static_cast<std::size_t>(block_unit_[b])];
        }
        return true;
    }
    // Where rows spread, the tiles that transpose read what comes later than the codes.
    bool arrived(const RowTile& tile) const {
        for (const int block : tile.blocks)
            if (arrived_[static_cast<std::size_t>(block)] == 0 || (s_.fault != 6 && !is_spread(block)))
                return false;
        return true;
    }
    // What a wgrad tile reads in addition to dz and h.
    void check_read(const Gradient& g) {
        const int first =
            first_block_[static_cast<std::size_t>(g.run.unit)] + g.run.first_row / layout::kTileRows;
        for (int row = 0; row < g.run.rows; row += layout::kTileRows) {
            const int block = first + row / layout::kTileRows;
            if (s_.transposes > 0 && transposed_[static_cast<std::size_t>(block)] != s_.transposes)
                fault_ = "a gradient reads rows that are not transposed";
            if (s_.transposes == 0 && !is_spread(block)) fault_ = "rows are read that are not there";
        }
    }
    // What is written lies where the rows of the chunk two before lay.
    void check_free(std::size_t c) {
        if (c < 2) return;
        if (sent_[c - 2] != blocks_[c - 2] || gradients_[c - 2] != gradients_wanted_[c - 2])
            fault_ = "rows of chunk " + std::to_string(c - 2) + " are overwritten";
        for (int unit = 0; unit < p_.rows.size(); ++unit)
            if (chunk(unit) == c - 2 && left_[static_cast<std::size_t>(unit)] != 0)
                fault_ = "tiles of chunk " + std::to_string(c - 2) + " still read";
    }

    bool try_pull(Share& share) {
        if (share.chunk >= p_.chunks) return false;
        const auto c = static_cast<std::size_t>(share.chunk);
        if (c >= 2 && sent_[c - 2] < blocks_[c - 2]) return false;
        if (c >= 2 && s_.fault != 2 && gradients_[c - 2] < gradients_wanted_[c - 2]) return false;
        const auto first = static_cast<std::size_t>(first_block_[c * static_cast<std::size_t>(p_.num_local)]);
        if (share.at >= static_cast<std::size_t>(blocks_[c])) {
            share.spreading = s_.spreads && !share.spreading;
            if (!share.spreading) ++share.chunk;
            share.at = static_cast<std::size_t>(&share - pulled_.data());
            return true;
        }
        check_free(c);
        (share.spreading ? spread_ : arrived_)[first + share.at] = 1;
        share.at += pulled_.size();
        return true;
    }
    bool try_push() {
        for (std::size_t block = 0; block < pushed_.size(); ++block) {
            const bool done = s_.needs_dx ? dx_[block] == p_.down_columns : dz_[block] == p_.gate_up_columns;
            if (pushed_[block] != 0 || !done) continue;
            pushed_[block] = 1;
            ++sent_[chunk(block_unit_[block])];
            return true;
        }
        return false;
    }

    Problem p_;
    Settings s_;
    std::vector<int> first_block_;  // by unit
    std::vector<int> block_unit_;
    std::vector<int> arrived_, spread_, dz_, dx_, transposed_, pushed_;  // by block
    std::vector<int> blocks_, sent_;                                     // by chunk
    std::vector<int> gradients_, gradients_wanted_;
    std::vector<int> left_;  // tiles of dz and dx and that transpose, by unit
    std::vector<int> turns_;
    int zeros_ = 0;
    int zeros_wanted_ = 0;
    std::vector<RowTile> row_tiles_;
    std::vector<RowTile> transposes_;
    std::vector<Gradient> gradient_tiles_;
    int next_row_ = 0;
    int next_transpose_ = 0;
    int next_gradient_ = 0;
    std::vector<Cluster> clusters_;
    std::vector<Share> pulled_;
    std::vector<std::function<bool()>> roles_;
    std::string fault_;
};

// Rules that are left out are found: they stop, overwrite what is still read, or change an order.
void test_planted_faults() {
    Problem p{3, 4, 2, 2, 3, 6, {{300, 0, 200, 300, 64, 100, 300, 200, 1, 500, 2, 700}}};
    p.num_local = 3;
    for (int fault = 0; fault <= 6; ++fault) {
        int found = 0;
        for (unsigned seed = 0; seed < 40; ++seed) {
            const bool transposes = fault > 4 || (fault == 0 && seed % 2 == 0);
            const Settings s{true, true, 2, 2, 2, true, seed, fault, transposes ? 2 : 0};
            found += Rank(p, s).run().empty() ? 0 : 1;
        }
        CHECK((fault == 0) == (found == 0), "planted fault %d was found %d times", fault, found);
    }
}

}  // namespace

void test_backward_progress() {
    test_planted_faults();
    std::mt19937 made(13);
    const auto pick = [&](auto... values) {
        const int all[] = {values...};
        return all[std::uniform_int_distribution<std::size_t>(0, std::size(all) - 1)(made)];
    };
    for (int trial = 0; trial < 2000; ++trial) {
        Problem p{};
        p.num_local = pick(1, 2, 3, 5);
        p.chunks = pick(1, 2, 3, 5);
        p.gate_up_columns = pick(1, 2, 3);
        p.down_columns = pick(1, 2, 4);
        p.clusters = pick(1, 2, 5);
        p.lag = pick(0, 1, 3) * p.clusters;
        p.rows = {std::vector<int>(static_cast<std::size_t>(p.chunks * p.num_local))};
        for (int& count : p.rows.counts)
            count = pick(0, 1, 63, 64, 65, 127, 128, 129, 300, 700);
        if (pick(0, 0, 0, 0, 1) == 1) p.rows.counts[0] = 2 * layout::kPartRows + 5;
        const Settings s{pick(0, 1) == 1,
                         pick(0, 1) == 1,
                         pick(0, 1, 3, 6),
                         pick(1, 2, 5),
                         pick(1, 2, 3, 4),
                         pick(0, 1) == 1,
                         static_cast<unsigned>(made()),
                         0,
                         pick(0, 1, 2, 4)};
        const std::string what = Rank(p, s).run();
        CHECK(what.empty(), "trial %d, %s, %d tiles of gradients, dx %d: %s", trial, p.name().c_str(),
              s.gradient_tiles, s.needs_dx, what.c_str());
    }
}
