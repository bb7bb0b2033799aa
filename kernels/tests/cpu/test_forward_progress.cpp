#include <array>
#include <deque>
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

constexpr int kRing = 4;  // tickets that a cluster draws ahead
constexpr std::size_t kPushesAhead = 3;

// A token with rows on this rank: its blocks of 64 rows, in the order of its experts.
struct Resident {
    int chunk;
    int first_expert;
    int last_expert;
    std::vector<int> blocks;
};

struct Tile {
    struct Part {
        int block;      // of 64 rows
        int wanted;     // rows of it that must have arrived, for gate/up
        int warpgroup;  // that stores it
    };
    int unit;
    bool down;
    std::vector<Part> parts;  // of its live CTAs
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
        : p_(p), s_(s), clusters_(static_cast<std::size_t>(p.clusters)), next_ticket_(p.clusters) {
        fill_units(made);
        cut_tiles(runs);
        pulled_.assign(static_cast<std::size_t>(s.pullers), {});
        held_.resize(static_cast<std::size_t>(s.pushers));
        for (std::size_t i = 0; i < pulled_.size(); ++i)
            pulled_[i].second = static_cast<int>(i);
        for (int cluster = 0; cluster < p.clusters; ++cluster) {
            clusters_[static_cast<std::size_t>(cluster)].tickets = {cluster};
            roles_.emplace_back([this, cluster] { return try_draw(cluster); });
            roles_.emplace_back([this, cluster] { return try_load(cluster); });
            for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
                roles_.emplace_back([this, cluster, warpgroup] { return try_multiply(cluster, warpgroup); });
                roles_.emplace_back([this, cluster, warpgroup] { return try_store(cluster, warpgroup); });
            }
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
        for (const auto& left : left_in_chunk_)
            if (left[0] != 0 || left[1] != 0) return "some tiles are never computed";
        return "";
    }

  private:
    struct Cluster {
        std::vector<int> tickets;  // drawn so far: its tiles, in its own order
        int loaded = 0;
        int multiplied[2] = {};  // by each of its two math warpgroups
        int stored[2] = {};
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
                Tile tile{run.unit, run.down, {}};
                for (int cta = 0; cta < 2; ++cta) {
                    const layout::CtaTile part = layout::cta_tile(
                        index, cta, run.rows, run.down ? p_.down_columns : p_.gate_up_columns);
                    if (!part.live) continue;
                    for (int row = 0; row < layout::kTileRows && part.first_row + row < run.rows;
                         row += layout::kRowBlock)
                        tile.parts.push_back({first_block_[static_cast<std::size_t>(run.unit)] +
                                                  (part.first_row + row) / layout::kRowBlock,
                                              std::min(run.rows - part.first_row - row, layout::kRowBlock),
                                              row / layout::kRowBlock});
                }
                tiles_.push_back(tile);
            }
        left_in_chunk_.assign(static_cast<std::size_t>(p_.chunks), {});
        for (const Tile& tile : tiles_)
            left_in_chunk_[static_cast<std::size_t>(p_.chunk_of(tile.unit))][tile.down ? 1 : 0] +=
                static_cast<int>(tile.parts.size());
    }

    bool exists(int ticket) const { return ticket < static_cast<int>(tiles_.size()); }
    int multiplied(const Cluster& c) const { return std::min(c.multiplied[0], c.multiplied[1]); }

    bool try_draw(int cluster) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        if (!exists(c.tickets.back()) || static_cast<int>(c.tickets.size()) - multiplied(c) > kRing)
            return false;
        c.tickets.push_back(next_ticket_++);
        return true;
    }

    bool try_load(int cluster) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        if (c.loaded == static_cast<int>(c.tickets.size()) || c.loaded - multiplied(c) >= s_.depth)
            return false;
        const int ticket = c.tickets[static_cast<std::size_t>(c.loaded)];
        if (!exists(ticket)) return false;
        const Tile& tile = tiles_[static_cast<std::size_t>(ticket)];
        for (const Tile::Part& part : tile.parts) {
            const auto block = static_cast<std::size_t>(part.block);
            if (tile.down ? gate_up_done_[block] < p_.gate_up_columns : arrived_[block] < part.wanted)
                return false;
        }
        ++c.loaded;
        return true;
    }

    bool try_multiply(int cluster, int warpgroup) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        if (c.multiplied[warpgroup] >= c.loaded || c.stored[warpgroup] < c.multiplied[warpgroup])
            return false;
        ++c.multiplied[warpgroup];
        return true;
    }

    bool try_store(int cluster, int warpgroup) {
        Cluster& c = clusters_[static_cast<std::size_t>(cluster)];
        if (c.stored[warpgroup] == c.multiplied[warpgroup]) return false;
        const int at = c.tickets[static_cast<std::size_t>(c.stored[warpgroup])];
        const Tile& tile = tiles_[static_cast<std::size_t>(at)];
        const auto chunk = static_cast<std::size_t>(p_.chunk_of(tile.unit));
        // h and o of the chunk two before lie where these go: its down tiles have read the one, its sums the
        // other.
        if (chunk >= 2 && (left_in_chunk_[chunk - 2][1] > 0 || sent_[chunk - 2] < residents_[chunk - 2]))
            fault_ = "tile " + std::to_string(at) + " overwrites rows of chunk " + std::to_string(chunk - 2);
        for (const Tile::Part& part : tile.parts) {
            if (part.warpgroup != warpgroup) continue;
            ++(tile.down ? down_done_ : gate_up_done_)[static_cast<std::size_t>(part.block)];
            --left_in_chunk_[chunk][tile.down ? 1 : 0];
        }
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

    // Pushers draw entries ahead, and work them off one after another as each gets ready.
    bool try_push(std::size_t pusher) {
        std::deque<int>& held = held_[pusher];
        if (held.size() < kPushesAhead && next_push_ < static_cast<int>(push_list_.size())) {
            held.push_back(next_push_++);
            return true;
        }
        if (held.empty()) return false;
        const Resident& token = push_list_[static_cast<std::size_t>(held.front())];
        for (const int block : token.blocks)
            if (down_done_[static_cast<std::size_t>(block)] < p_.down_columns) return false;
        ++sent_[static_cast<std::size_t>(token.chunk)];
        held.pop_front();
        return true;
    }

    const Problem& p_;
    Settings s_;
    std::vector<Cluster> clusters_;
    std::vector<std::function<bool()>> roles_;
    std::vector<Resident> pull_list_, push_list_;
    std::vector<Tile> tiles_;
    std::vector<int> first_block_, arrived_, gate_up_done_, down_done_, sent_, residents_;
    std::vector<std::array<int, 2>> left_in_chunk_;  // parts of tiles not stored: gate/up, down
    std::vector<std::pair<int, int>> pulled_;        // of each puller: chunk, next entry in it
    std::vector<std::deque<int>> held_;              // entries of each pusher
    int next_push_ = 0;
    int next_ticket_;  // each cluster's first is its own number
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
