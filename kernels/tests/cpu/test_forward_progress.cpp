#include <array>
#include <functional>
#include <numeric>
#include <utility>

#include "cpu/check.h"
#include "cpu/forward_units.h"

// The roles of one rank's forward as they wait for one another, in every order that a scheduler of ours
// thinks of: they always end, and no row is overwritten before its last reader is through.
namespace {

namespace layout = mega_moe::layout;
using forward_units::Problem;
using layout::TileRun;
using Runs = std::vector<TileRun>;

constexpr int kRing = 4;  // tiles that a cluster knows ahead

// A token with rows on this rank: its blocks of 64 rows, in the order of its experts.
struct Resident {
    int chunk;
    int first_expert;
    int last_expert;
    std::vector<int> blocks;
};

struct Tile {
    int unit;
    bool down;
    std::vector<int> blocks;  // that its live CTAs read and write
    std::vector<int> wanted;  // rows of each that must have arrived, for gate/up
};

struct Settings {
    int pullers;
    int pushers;
    int depth;  // tiles that a cluster loads before it has multiplied them
    unsigned seed;
};

// All words that roles wait for, and the roles. Each `try_` makes one step if nothing holds it back.
class Rank {
  public:
    Rank(const Problem& p, const Runs& runs, const Settings& s, std::mt19937& made)
        : p_(p), s_(s), clusters_(static_cast<std::size_t>(p.clusters)) {
        fill_units(made);
        cut_tiles(runs);
        pulled_.assign(static_cast<std::size_t>(s.pullers), {});
        held_.assign(static_cast<std::size_t>(s.pushers), -1);
        for (std::size_t i = 0; i < pulled_.size(); ++i)
            pulled_[i].second = static_cast<int>(i);
        for (int cluster = 0; cluster < p.clusters; ++cluster) {
            roles_.emplace_back([this, cluster] { return try_load(cluster); });
            roles_.emplace_back([this, cluster] { return try_multiply(cluster); });
            roles_.emplace_back([this, cluster] { return try_store(cluster, 0); });
            roles_.emplace_back([this, cluster] { return try_store(cluster, 1); });
        }
        for (std::size_t i = 0; i < pulled_.size(); ++i)
            roles_.emplace_back([this, i] { return try_pull(i); });
        for (std::size_t i = 0; i < held_.size(); ++i)
            roles_.emplace_back([this, i] { return try_push(i); });
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
        for (std::size_t chunk = 0; chunk < sent_.size(); ++chunk)
            if (sent_[chunk] != residents_[chunk])
                return "nothing moves, and chunk " + std::to_string(chunk) + " is not sent";
        for (std::size_t i = 0; i < stored_tiles_.size(); ++i)
            if (!stored_tiles_[i]) return "tile " + std::to_string(i) + " is never computed";
        return "";
    }

  private:
    struct Cluster {
        int loaded = 0;  // tiles, in its own order
        int multiplied = 0;
        int stored[2] = {};  // by each of its two math warpgroups, which take tiles in turn
    };

    // Residents of random experts until each unit has its rows.
    void fill_units(std::mt19937& made) {
        const int units = p_.rows.size();
        first_block_.resize(static_cast<std::size_t>(units));
        residents_.assign(static_cast<std::size_t>(p_.chunks), 0);
        sent_ = residents_;
        int blocks = 0;
        for (int unit = 0; unit < units; ++unit) {
            first_block_[static_cast<std::size_t>(unit)] = blocks;
            blocks += (p_.rows(unit) + 2 * layout::kRowBlock - 1) / (2 * layout::kRowBlock) * 2;
        }
        arrived_.assign(static_cast<std::size_t>(blocks), 0);
        gate_up_done_ = arrived_;
        down_done_ = arrived_;
        for (int chunk = 0; chunk < p_.chunks; ++chunk) {
            std::vector<int> left(p_.rows.counts.begin() + chunk * p_.num_local,
                                  p_.rows.counts.begin() + (chunk + 1) * p_.num_local);
            std::vector<int> taken(left.size());
            for (std::size_t expert = 0; expert < left.size(); ++expert)
                while (left[expert] > 0) {
                    Resident token{chunk, static_cast<int>(expert), 0, {}};
                    // This expert and, at random, later ones.
                    for (std::size_t e = expert; e < left.size(); ++e) {
                        if (left[e] == 0 || (e > expert && made() % 3 != 0)) continue;
                        --left[e];
                        const int unit = chunk * p_.num_local + static_cast<int>(e);
                        token.blocks.push_back(first_block_[static_cast<std::size_t>(unit)] +
                                               taken[e]++ / layout::kRowBlock);
                        token.last_expert = static_cast<int>(e);
                    }
                    pull_list_.push_back(token);
                    ++residents_[static_cast<std::size_t>(chunk)];
                }
        }
        push_list_ = pull_list_;
        std::stable_sort(push_list_.begin(), push_list_.end(), [](const Resident& a, const Resident& b) {
            return std::pair(a.chunk, a.last_expert) < std::pair(b.chunk, b.last_expert);
        });
    }

    void cut_tiles(const Runs& runs) {
        for (const TileRun& run : runs)
            for (int index = 0; index < run.tiles; ++index) {
                Tile tile{run.unit, run.down, {}, {}};
                for (int cta = 0; cta < 2; ++cta) {
                    const layout::CtaTile part = layout::cta_tile(
                        index, cta, run.rows, run.down ? p_.down_columns : p_.gate_up_columns);
                    if (!part.live) continue;
                    tile.blocks.push_back(first_block_[static_cast<std::size_t>(run.unit)] +
                                          part.first_row / layout::kRowBlock);
                    tile.wanted.push_back(std::min(run.rows - part.first_row, layout::kRowBlock));
                }
                tiles_.push_back(tile);
            }
        stored_tiles_.assign(tiles_.size(), false);
        left_in_chunk_.assign(static_cast<std::size_t>(p_.chunks), {});
        for (const Tile& tile : tiles_)
            ++left_in_chunk_[static_cast<std::size_t>(p_.chunk_of(tile.unit))][tile.down ? 1 : 0];
    }

    // The n-th tile of a cluster: clusters take tickets in turn.
    int ticket(int cluster, int n) const { return cluster + n * p_.clusters; }
    bool exists(int at) const { return at < static_cast<int>(tiles_.size()); }

    bool try_load(int cluster) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        const int at = ticket(cluster, c.loaded);
        if (!exists(at) || c.loaded - c.multiplied >= std::min(s_.depth, kRing)) return false;
        const Tile& tile = tiles_[static_cast<std::size_t>(at)];
        for (std::size_t i = 0; i < tile.blocks.size(); ++i) {
            const auto block = static_cast<std::size_t>(tile.blocks[i]);
            if (tile.down ? gate_up_done_[block] < p_.gate_up_columns : arrived_[block] < tile.wanted[i])
                return false;
        }
        ++c.loaded;
        return true;
    }

    bool try_multiply(int cluster) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        // The warpgroup must have stored the tile before its last.
        if (c.multiplied == c.loaded || c.stored[c.multiplied % 2] < c.multiplied / 2) return false;
        ++c.multiplied;
        return true;
    }

    bool try_store(int cluster, int warpgroup) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        const int own = 2 * c.stored[warpgroup] + warpgroup;
        if (own >= c.multiplied) return false;
        const auto at = static_cast<std::size_t>(ticket(cluster, own));
        const Tile& tile = tiles_[at];
        const int chunk = p_.chunk_of(tile.unit);
        // h and o of the chunk two before lie where these go: its down tiles have read the one, its sums the
        // other.
        if (chunk >= 2 &&
            (left_in_chunk_[static_cast<std::size_t>(chunk - 2)][1] > 0 ||
             sent_[static_cast<std::size_t>(chunk - 2)] < residents_[static_cast<std::size_t>(chunk - 2)]))
            fault_ = "tile " + std::to_string(at) + " overwrites rows of chunk " + std::to_string(chunk - 2);
        for (const int block : tile.blocks)
            ++(tile.down ? down_done_ : gate_up_done_)[static_cast<std::size_t>(block)];
        --left_in_chunk_[static_cast<std::size_t>(chunk)][tile.down ? 1 : 0];
        stored_tiles_[at] = true;
        ++c.stored[warpgroup];
        return true;
    }

    // Each puller has its share of every chunk, and works it off chunk by chunk.
    bool try_pull(std::size_t puller) {
        auto& [first, at] = pulled_[puller];
        if (first >= p_.chunks) return false;
        const auto chunk = static_cast<std::size_t>(first);
        if (chunk >= 2 && sent_[chunk - 2] < residents_[chunk - 2]) return false;
        if (at >= residents_[chunk]) {
            ++first;
            at = static_cast<int>(puller);
            return true;
        }
        const int before = std::accumulate(residents_.begin(), residents_.begin() + first, 0);
        if (chunk >= 2 && (left_in_chunk_[chunk - 2][0] > 0 || left_in_chunk_[chunk - 2][1] > 0))
            fault_ = "a row of x of chunk " + std::to_string(chunk - 2) + " is overwritten";
        for (const int block : pull_list_[static_cast<std::size_t>(before + at)].blocks)
            ++arrived_[static_cast<std::size_t>(block)];
        at += s_.pullers;
        return true;
    }

    // Pushers draw the next entry and then wait for it.
    bool try_push(std::size_t pusher) {
        int& held = held_[pusher];
        if (held < 0) {
            if (next_push_ >= static_cast<int>(push_list_.size())) return false;
            held = next_push_++;
            return true;
        }
        const Resident& token = push_list_[static_cast<std::size_t>(held)];
        for (const int block : token.blocks)
            if (down_done_[static_cast<std::size_t>(block)] < p_.down_columns) return false;
        ++sent_[static_cast<std::size_t>(token.chunk)];
        held = -1;
        return true;
    }

    const Problem& p_;
    Settings s_;
    std::vector<Cluster> clusters_;
    std::vector<std::function<bool()>> roles_;
    std::vector<Resident> pull_list_, push_list_;
    std::vector<Tile> tiles_;
    std::vector<int> first_block_, arrived_, gate_up_done_, down_done_, sent_, residents_;
    std::vector<std::array<int, 2>> left_in_chunk_;  // tiles not stored: gate/up, down
    std::vector<bool> stored_tiles_;
    std::vector<std::pair<int, int>> pulled_;  // of each puller: chunk, next entry in it
    std::vector<int> held_;                    // entry of each pusher, or -1
    int next_push_ = 0;
    std::string fault_;
};

Problem random_problem(std::mt19937& made) {
    const auto pick = [&](auto... values) {
        const int all[] = {values...};
        return all[std::uniform_int_distribution<std::size_t>(0, std::size(all) - 1)(made)];
    };
    Problem p{};
    p.num_local = pick(1, 2, 3, 8, 16);
    p.chunks = pick(1, 2, 3, 5, 8);
    p.gate_up_columns = pick(1, 3, 5);
    p.down_columns = pick(1, 2, 7);
    p.clusters = pick(1, 2, 5, 16);
    p.lag = pick(0, 1, 3, 1000) * p.clusters;
    p.rows.counts.resize(static_cast<std::size_t>(p.chunks * p.num_local));
    static constexpr int kCounts[] = {0, 0, 1, 63, 64, 65, 127, 128, 129, 300};
    for (int& count : p.rows.counts)
        count = kCounts[made() % std::size(kCounts)];
    if (made() % 4 == 0) {  // a chunk without a row here
        const auto chunk = static_cast<long>(made() % static_cast<unsigned>(p.chunks));
        std::fill_n(p.rows.counts.begin() + chunk * p.num_local, p.num_local, 0);
    }
    return p;
}

std::string result_of(const Problem& p, const Runs& runs, std::mt19937& made) {
    const Settings s{static_cast<int>(1 + made() % 5), static_cast<int>(1 + made() % 6),
                     static_cast<int>(1 + made() % 4), static_cast<unsigned>(made())};
    return Rank(p, runs, s, made).run();
}

Runs renumbered(Runs runs) {
    int ticket = 0;
    for (TileRun& run : runs) {
        run.first_ticket = ticket;
        ticket += run.tiles;
    }
    return runs;
}

// Orders that are wrong are found: they stop, or overwrite what is still read.
void test_planted_faults() {
    std::mt19937 made(7);
    const Problem p{2, 4, 2, 2, 2, 6, {{300, 200, 300, 64, 100, 300, 200, 1}}};
    Runs runs = forward_units::runs_of(p);
    CHECK(result_of(p, runs, made).empty(), "the right order does not end");
    std::stable_sort(runs.begin(), runs.end(),
                     [](const TileRun& a, const TileRun& b) { return a.down < b.down; });
    CHECK(!result_of(p, renumbered(runs), made).empty(), "a chunk too far ahead was not found");
    runs = forward_units::runs_of(p);
    std::stable_sort(runs.begin(), runs.end(),
                     [](const TileRun& a, const TileRun& b) { return a.down > b.down; });
    CHECK(!result_of(p, renumbered(runs), made).empty(), "down tiles before their inputs were not found");
    runs = forward_units::runs_of(p);
    runs.pop_back();
    CHECK(!result_of(p, runs, made).empty(), "missing tiles were not found");
}

}  // namespace

void test_forward_progress() {
    test_planted_faults();
    std::mt19937 made(11);
    for (int trial = 0; trial < 2000; ++trial) {
        const Problem p = random_problem(made);
        const std::string what = result_of(p, forward_units::runs_of(p), made);
        CHECK(what.empty(), "trial %d, %s: %s", trial, p.name().c_str(), what.c_str());
    }
}
