#include "emulate/cuda.h"
// The primitives above come first: the device code below is compiled for the CPU with them.
#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "cpu/check.h"
#include "device/route/route.cuh"
#include "host/route_params.h"
#include "layout/record.h"
#include "layout/route_shared.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

// The routing phase as it is compiled for the GPU, with CTAs and ranks as fibers, against a stable sort.
namespace {

namespace layout = mega_moe::layout;
using mega_moe::BufferShape;
using mega_moe::RankCall;

constexpr unsigned kThreads = 128;
constexpr std::uint8_t kPoison = 0xEE;

using Ids = std::vector<std::vector<std::int64_t>>;  // [rank][token * top_k + slot]

struct Rank {
    std::vector<std::uint8_t> symmetric;
    std::vector<std::uint8_t> workspace;
    std::vector<std::int64_t> record;
    std::vector<std::int32_t> summary;
    std::vector<float> weights;
};

std::uint8_t* aligned(std::vector<std::uint8_t>& memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (256 - address % 256) % 256;
}

// Parts that must be zero when a buffer is new; all others may hold anything.
void poison(std::uint8_t* base, const mega_moe::LayoutTable& table, const std::vector<int>& zero) {
    std::memset(base, kPoison, static_cast<std::size_t>(table.total));
    for (const int part : zero)
        std::memset(base + table.parts[part].offset, 0, static_cast<std::size_t>(table.parts[part].bytes));
}

// Bytes between the parts.
void check_canaries(const std::uint8_t* base, const mega_moe::LayoutTable& table) {
    std::int64_t next = 0;
    for (int i = 0; i <= table.count; ++i) {
        const std::int64_t end = i < table.count ? table.parts[i].offset : table.total;
        for (; next < end; ++next)
            CHECK(base[next] == kPoison, "byte %lld was written", static_cast<long long>(next));
        if (i < table.count) next = table.parts[i].offset + table.parts[i].bytes;
    }
}

// Tables whose one chunk takes both pools.
int joined_tables = 0;

struct World {
    BufferShape shape;
    mega_moe::LayoutTable symmetric;
    mega_moe::LayoutTable workspace;
    std::vector<Rank> ranks;
    std::vector<std::int64_t> addresses;

    explicit World(const BufferShape& s)
        : shape(s), symmetric(mega_moe::symmetric_layout(s)), workspace(mega_moe::workspace_layout(s)) {
        ranks.resize(static_cast<std::size_t>(s.num_ranks));
        for (Rank& rank : ranks) {
            rank.symmetric.resize(static_cast<std::size_t>(symmetric.total + 256));
            rank.workspace.resize(static_cast<std::size_t>(workspace.total + 256));
            poison(aligned(rank.symmetric), symmetric,
                   {layout::kControlWords, layout::kHeaders, layout::kBlockFlags});
            poison(aligned(rank.workspace), workspace, {layout::kSync, layout::kGroupCounts});
            rank.record.assign(static_cast<std::size_t>(layout::kRecordWords), 0);
            rank.summary.assign(static_cast<std::size_t>(mega_moe::summary_length(s)), -7);
            addresses.push_back(
                static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(aligned(rank.symmetric))));
        }
    }

    template <class T>
    const T* part(std::size_t rank, layout::WorkspacePart which) {
        return reinterpret_cast<const T*>(aligned(ranks[rank].workspace) + workspace.parts[which].offset);
    }

    // One launch of the ranks in `present`, each with its number of CTAs.
    void launch(const Ids& ids, const std::vector<unsigned>& ctas, const std::vector<bool>& present = {},
                int refusing = -1) {
        std::vector<mega_moe::layout::RouteParams> params;
        std::vector<mega_moe::emulate::Grid> grids;
        params.reserve(ranks.size());
        for (std::size_t r = 0; r < ranks.size(); ++r) {
            Rank& rank = ranks[r];
            const std::size_t pairs = ids[r].size();
            rank.weights.resize(pairs + 1);
            for (std::size_t i = 0; i < pairs; ++i)
                rank.weights[i] = static_cast<float>(r * 1000003 + i) * 0.37f;
            std::fill(rank.summary.begin(), rank.summary.end(), -7);
            RankCall problem{};
            problem.shape = shape;
            problem.inputs.topk_idx = ids[r].data();
            problem.inputs.topk_weights = rank.weights.data();
            problem.summary = rank.summary.data();
            problem.buffers = addresses.data();
            problem.workspace = aligned(rank.workspace);
            problem.record = rank.record.data();
            problem.num_tokens = static_cast<std::int64_t>(pairs) / shape.top_k;
            problem.rank = static_cast<std::int64_t>(r);
            problem.arrival_ns = 200'000'000;
            problem.progress_ns = 100'000'000;
            problem.idx_is_64_bit = true;
            problem.weighted = true;
            problem.refuse = static_cast<int>(r) == refusing;
            if (problem.refuse) problem.num_tokens = shape.max_tokens + 5;
            params.push_back(mega_moe::make_route_params(problem));
            if (!present.empty() && !present[r]) continue;
            const mega_moe::layout::RouteParams& p = params.back();
            const auto shared =
                static_cast<std::size_t>(layout::make_route_shared(kThreads, p.endpoint.num_ranks,
                                                                   p.num_local, p.max_blocks, p.one_chunk)
                                             .total);
            grids.push_back({ctas[r % ctas.size()], kThreads, shared,
                             [&p](std::byte* memory) { mega_moe::device::route<kThreads>(p, memory); }});
        }
        mega_moe::emulate::run(grids);
    }
};

// What one rank's tables must hold, from sorts of all pairs.
void check_tables(World& world, std::size_t rank, const Ids& ids) {
    const BufferShape& s = world.shape;
    const std::int64_t num_local = s.num_experts / s.num_ranks;
    const std::int64_t first_expert = static_cast<std::int64_t>(rank) * num_local;
    const auto tokens_of = [&](std::size_t r) { return static_cast<std::int64_t>(ids[r].size()) / s.top_k; };
    std::int64_t most = 0;
    for (std::size_t r = 0; r < ids.size(); ++r)
        most = std::max(most, tokens_of(r));
    const auto local = [&](std::size_t r, std::int64_t token, std::int64_t slot) {
        const std::int64_t id = ids[r][static_cast<std::size_t>(token * s.top_k + slot)];
        return id < 0 || id >= s.num_experts ? -1 : id - first_expert;
    };
    const auto held = [&](std::int64_t e) { return e >= 0 && e < num_local; };

    std::vector<std::int64_t> rows_of_block(static_cast<std::size_t>((most + 127) / 128), 0);
    for (std::size_t r = 0; r < ids.size(); ++r)
        for (std::int64_t t = 0; t < tokens_of(r); ++t)
            for (std::int64_t k = 0; k < s.top_k; ++k)
                if (held(local(r, t, k))) ++rows_of_block[static_cast<std::size_t>(t / 128)];
    // Chunks: greedy runs of blocks, or one where both pools hold all rows.
    std::int64_t limit = s.pool_rows - num_local * 127;
    const std::int64_t rows_of_all =
        std::accumulate(rows_of_block.begin(), rows_of_block.end(), std::int64_t{0});
    const bool two_pools = s.max_tokens > 128 && s.max_tokens * s.num_ranks * s.top_k > limit;
    const bool joined = two_pools && s.pool_rows > mega_moe::smallest_pool_rows(s) &&
                        rows_of_all <= 2 * s.pool_rows - num_local * 127;
    if (joined && rows_of_all > limit) {
        limit = rows_of_all;
        ++joined_tables;
    }
    std::vector<std::int64_t> cuts{0};
    std::int64_t in_chunk = 0;
    for (std::size_t b = 0; b < rows_of_block.size(); ++b) {
        if (in_chunk + rows_of_block[b] > limit) {
            cuts.push_back(static_cast<std::int64_t>(b));
            in_chunk = 0;
        }
        in_chunk += rows_of_block[b];
    }
    cuts.push_back(static_cast<std::int64_t>(rows_of_block.size()));
    const auto chunks = static_cast<std::int64_t>(cuts.size()) - 1;
    const std::int32_t* summary = world.ranks[rank].summary.data();
    CHECK(summary[layout::kSummaryChunks] == chunks, "chunks: got %d, want %lld",
          summary[layout::kSummaryChunks], static_cast<long long>(chunks));

    using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // token, source rank, slot
    std::vector<std::int64_t> all_rows(static_cast<std::size_t>(3 * num_local + 2), 0);
    std::int64_t rows_before = 0;
    std::int64_t residents_before = 0;
    std::map<Key, std::int64_t> slot_of;
    for (std::int64_t c = 0; c < chunks; ++c) {
        const std::int64_t begin = cuts[static_cast<std::size_t>(c)] * 128;
        const std::int64_t end = std::min(cuts[static_cast<std::size_t>(c) + 1] * 128, most);
        std::vector<std::vector<Key>> by_expert(static_cast<std::size_t>(num_local));
        std::vector<std::vector<Key>> by_first(by_expert.size());
        std::vector<std::vector<Key>> by_last(by_expert.size());
        std::int64_t rows = 0;
        std::int64_t residents = 0;
        for (std::int64_t t = begin; t < end; ++t)
            for (std::size_t r = 0; r < ids.size(); ++r) {
                if (t >= tokens_of(r)) continue;
                std::int64_t low = num_local, high = -1, count = 0;
                for (std::int64_t k = 0; k < s.top_k; ++k) {
                    const std::int64_t e = local(r, t, k);
                    if (!held(e)) continue;
                    by_expert[static_cast<std::size_t>(e)].push_back({t, static_cast<std::int64_t>(r), k});
                    low = std::min(low, e);
                    high = std::max(high, e);
                    ++count;
                }
                rows += count;
                if (count == 0) continue;
                ++residents;
                by_first[static_cast<std::size_t>(low)].push_back({t, static_cast<std::int64_t>(r), count});
                by_last[static_cast<std::size_t>(high)].push_back({t, static_cast<std::int64_t>(r), count});
            }
        const std::int64_t first_slot = layout::chunk_first_slot(rows_before, c, num_local);
        std::int64_t slot = first_slot;
        const std::int64_t table = c * num_local;
        for (std::int64_t e = 0; e < num_local; ++e) {
            const auto& list = by_expert[static_cast<std::size_t>(e)];
            CHECK(world.part<std::int32_t>(rank, layout::kExpertRows)[table + e] ==
                      static_cast<int>(list.size()),
                  "rows of expert %lld in chunk %lld: got %d, want %zu", static_cast<long long>(e),
                  static_cast<long long>(c), world.part<std::int32_t>(rank, layout::kExpertRows)[table + e],
                  list.size());
            CHECK(world.part<std::int32_t>(rank, layout::kExpertSlots)[table + e] == slot,
                  "first slot of an expert");
            for (std::size_t i = 0; i < list.size(); ++i) {
                const auto [t, r, k] = list[i];
                const std::uint64_t entry =
                    world.part<std::uint64_t>(rank, layout::kSlots)[slot + static_cast<std::int64_t>(i)];
                const auto want =
                    layout::encode_source(static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(r),
                                          static_cast<std::uint32_t>(k));
                CHECK(static_cast<std::uint32_t>(entry) == want, "slot %lld of expert %lld: got %x, want %x",
                      static_cast<long long>(i), static_cast<long long>(e), static_cast<std::uint32_t>(entry),
                      want);
                const auto bits = static_cast<std::uint32_t>(entry >> 32);
                float weight;
                std::memcpy(&weight, &bits, 4);
                CHECK(weight == world.ranks[static_cast<std::size_t>(r)]
                                    .weights[static_cast<std::size_t>(t * s.top_k + k)],
                      "weight of a slot");
                slot_of[{t, r, k}] = slot + static_cast<std::int64_t>(i);
            }
            all_rows[static_cast<std::size_t>(e)] += static_cast<std::int64_t>(list.size());
            slot += layout::pad_rows(static_cast<std::int64_t>(list.size()));
        }
        CHECK(slot - first_slot <= (joined ? 2 : 1) * s.pool_rows, "a chunk overflows the pool");
        CHECK((slot) * 8 <= world.workspace.parts[layout::kSlots].bytes, "slots overflow their table");
        for (const bool last : {false, true}) {
            const auto& lists = last ? by_last : by_first;
            const auto* starts =
                world.part<std::int32_t>(rank, last ? layout::kPushStarts : layout::kPullStarts);
            const auto* entries =
                world.part<std::uint64_t>(rank, last ? layout::kPushList : layout::kPullList);
            std::int64_t at = residents_before;
            for (std::int64_t e = 0; e < num_local; ++e) {
                CHECK(starts[table + e] == at, "start of a list: got %d, want %lld", starts[table + e],
                      static_cast<long long>(at));
                const auto& list = lists[static_cast<std::size_t>(e)];
                all_rows[static_cast<std::size_t>((last ? 2 : 1) * num_local + e)] +=
                    static_cast<std::int64_t>(list.size());
                for (const auto& [t, r, count] : list) {
                    const std::uint64_t entry = entries[at++];
                    CHECK(static_cast<std::uint32_t>(entry) ==
                              layout::encode_source(static_cast<std::uint32_t>(t),
                                                    static_cast<std::uint32_t>(r),
                                                    static_cast<std::uint32_t>(count - 1)),
                          "entry of a list");
                    const std::uint32_t* slots =
                        world.part<std::uint32_t>(rank, layout::kSlotList) + (entry >> 32);
                    for (std::int64_t k = 0; k < s.top_k; ++k)
                        if (held(local(static_cast<std::size_t>(r), t, k)))
                            CHECK(*slots++ == slot_of[Key(t, r, k)], "slots of a resident token");
                }
            }
        }
        const std::int32_t* row =
            world.part<std::int32_t>(rank, layout::kChunkTable) + c * layout::kChunkWords;
        const std::int64_t want[] = {begin,    end, first_slot, slot - first_slot, rows, residents_before,
                                     residents};
        for (int i = 0; i < layout::kChunkResidents + 1; ++i)
            CHECK(row[i] == want[i], "word %d of chunk %lld: got %d, want %lld", i, static_cast<long long>(c),
                  row[i], static_cast<long long>(want[i]));
        rows_before += rows;
        residents_before += residents;
    }
    all_rows[static_cast<std::size_t>(3 * num_local)] = rows_before;
    all_rows[static_cast<std::size_t>(3 * num_local + 1)] = residents_before;
    for (std::size_t i = 0; i < all_rows.size(); ++i)
        CHECK(summary[layout::kSummaryWords + s.num_ranks + static_cast<std::int64_t>(i)] == all_rows[i],
              "column %zu: got %d, want %lld", i,
              summary[layout::kSummaryWords + s.num_ranks + static_cast<std::int64_t>(i)],
              static_cast<long long>(all_rows[i]));
    for (std::size_t r = 0; r < ids.size(); ++r)
        CHECK(summary[layout::kSummaryWords + static_cast<std::int64_t>(r)] == tokens_of(r),
              "tokens of a rank");
}

void check_all(World& world, const Ids& ids, int status = 0) {
    for (std::size_t r = 0; r < world.ranks.size(); ++r) {
        CHECK(world.ranks[r].summary[layout::kSummaryStatus] == status, "status of rank %zu: got %d, want %d",
              r, world.ranks[r].summary[layout::kSummaryStatus], status);
        check_tables(world, r, ids);
        check_canaries(aligned(world.ranks[r].symmetric), world.symmetric);
        check_canaries(aligned(world.ranks[r].workspace), world.workspace);
    }
}

enum class Routing { kRandom, kOneExpert, kOneRank, kMasked, kDuplicates };

Ids make_ids(std::mt19937& random, const BufferShape& s, const std::vector<std::int64_t>& tokens,
             Routing routing) {
    Ids ids;
    const auto pick = [&](std::int64_t n) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    for (const std::int64_t count : tokens) {
        std::vector<std::int64_t> row;
        for (std::int64_t t = 0; t < count; ++t) {
            std::vector<std::int64_t> experts(static_cast<std::size_t>(s.num_experts));
            for (std::size_t e = 0; e < experts.size(); ++e)
                experts[e] = static_cast<std::int64_t>(e);
            std::shuffle(experts.begin(), experts.end(), random);
            for (std::int64_t k = 0; k < s.top_k; ++k) {
                std::int64_t id = k < s.num_experts ? experts[static_cast<std::size_t>(k)] : -1;
                if (routing == Routing::kOneExpert) id = s.num_experts - 1;
                if (routing == Routing::kOneRank) id = pick(s.num_experts / s.num_ranks);
                if (routing == Routing::kMasked && pick(2) == 0) id = -1;
                if (routing == Routing::kDuplicates) id = pick(std::min<std::int64_t>(s.num_experts, 3));
                row.push_back(id);
            }
        }
        ids.push_back(std::move(row));
    }
    return ids;
}

// A pool of more than the smallest size may be joined with the other.
enum class Pool { kSmallest, kJoining, kLargest };

BufferShape make_shape(std::int64_t max_tokens, std::int64_t top_k, std::int64_t experts, std::int64_t ranks,
                       Pool pool) {
    BufferShape s{max_tokens, top_k, experts, 128, 0, ranks, 0, {}, true};
    const std::int64_t smallest = mega_moe::smallest_pool_rows(s);
    const std::int64_t largest = mega_moe::largest_pool_rows(s);
    s.pool_rows = pool == Pool::kSmallest  ? smallest
                  : pool == Pool::kLargest ? largest
                                           : std::min(smallest + 128, largest);
    return s;
}

void test_grid() {
    std::mt19937 random(7);
    const struct {
        std::int64_t max_tokens, top_k, experts, ranks;
        std::vector<unsigned> ctas;
    } cases[] = {
        {700, 8, 128, 1, {5}},      {130, 16, 384, 1, {1}},  {600, 8, 64, 2, {3, 4}},
        {300, 3, 12, 3, {2, 3, 1}}, {260, 2, 16, 8, {1, 2}}, {40, 6, 64, 32, {1}},
    };
    for (const auto& c : cases)
        for (const Pool pool : {Pool::kSmallest, Pool::kJoining, Pool::kLargest}) {
            World world(make_shape(c.max_tokens, c.top_k, c.experts, c.ranks, pool));
            for (const Routing routing : {Routing::kRandom, Routing::kOneExpert, Routing::kOneRank,
                                          Routing::kMasked, Routing::kDuplicates}) {
                std::vector<std::int64_t> tokens;
                for (std::int64_t r = 0; r < c.ranks; ++r)
                    tokens.push_back(r == 1   ? 0
                                     : r == 0 ? c.max_tokens
                                              : static_cast<std::int64_t>(
                                                    random() % static_cast<std::uint64_t>(c.max_tokens + 1)));
                const Ids ids = make_ids(random, world.shape, tokens, routing);
                world.launch(ids, c.ctas);
                check_all(world, ids);
            }
            const Ids none(static_cast<std::size_t>(c.ranks));
            world.launch(none, c.ctas);
            check_all(world, none);
        }
    CHECK(joined_tables > 0, "no case whose one chunk takes both pools");
}

void test_faults() {
    std::mt19937 random(3);
    const BufferShape shape = make_shape(300, 4, 16, 2, Pool::kLargest);
    {  // A bad id is masked, reported once, and harms no later launch.
        World world(shape);
        Ids ids = make_ids(random, shape, {300, 200}, Routing::kRandom);
        ids[1][7 * 4 + 2] = -5;
        world.launch(ids, {2});
        CHECK(world.ranks[0].summary[0] == 0 &&
                  world.ranks[1].summary[0] == static_cast<int>(layout::Kind::kBadId),
              "status");
        const auto& record = world.ranks[1].record;
        CHECK(record[layout::kRecordState] == 1 && record[layout::kRecordIndex] == 30 &&
                  record[layout::kRecordSeen] == -5 && record[layout::kRecordWanted] == 16 &&
                  record[layout::kRecordEpoch] == 1,
              "record of a bad id");
        CHECK(world.ranks[0].record[layout::kRecordState] == 0, "a record of the other rank");
        for (std::size_t r = 0; r < 2; ++r)
            check_tables(world, r, ids);
        ids = make_ids(random, shape, {100, 300}, Routing::kRandom);
        world.launch(ids, {2});
        check_all(world, ids);
    }
    {  // A refused call ends on all ranks, and the next one works.
        World world(shape);
        Ids ids = make_ids(random, shape, {300, 0}, Routing::kRandom);
        world.launch(ids, {2}, {}, 1);
        for (const Rank& rank : world.ranks) {
            CHECK(rank.summary[0] == static_cast<int>(layout::Kind::kRefused), "status %d", rank.summary[0]);
            CHECK(rank.summary[5] == -1, "a refused call reports counts");
        }
        CHECK(world.ranks[0].record[layout::kRecordKind] == static_cast<int>(layout::Kind::kRefused) &&
                  world.ranks[0].record[layout::kRecordIndex] == 1 &&
                  world.ranks[0].record[layout::kRecordSeen] == 305,
              "record of a refusal");
        CHECK(world.ranks[1].record[layout::kRecordState] == 0, "the refusing rank records itself");
        world.launch(ids, {2});
        check_all(world, ids);
    }
    {  // A rank that does not come: the other gives up in time, and so does the late one.
        World world(shape);
        const Ids ids = make_ids(random, shape, {300, 200}, Routing::kRandom);
        world.launch(ids, {3}, {true, false});
        const auto& record = world.ranks[0].record;
        CHECK(world.ranks[0].summary[0] == static_cast<int>(layout::Kind::kAborted), "status");
        CHECK(record[layout::kRecordKind] == static_cast<int>(layout::Kind::kArrival) &&
                  record[layout::kRecordIndex] == 1 && record[layout::kRecordSeen] == 0 &&
                  record[layout::kRecordWanted] == 1,
              "record of a missing rank");
        world.launch(ids, {3}, {false, true});
        const auto& late = world.ranks[1].record;
        CHECK(late[layout::kRecordKind] == static_cast<int>(layout::Kind::kAborted) &&
                  (late[layout::kRecordSeen] & 0xFF) == 1,
              "record of the late rank: kind %lld", static_cast<long long>(late[layout::kRecordKind]));
    }
}

}  // namespace

void test_route() {
    test_grid();
    test_faults();
}
