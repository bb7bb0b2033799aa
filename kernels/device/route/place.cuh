#pragma once
#include <cstdint>

#include "device/ptx/warp.cuh"
#include "device/route/scan.cuh"

// The entries of a CTA's tokens. Each warp has its own run of them and knows where its entries go, so warps
// meet no more once they place.
namespace mega_moe::device {

// One warp's shared memory: where its next entry of each column goes, and the lanes that have one.
struct WarpColumns {
    std::uint32_t* next;
    std::uint32_t* lanes;  // zero between steps
};

// A lane's token.
struct LaneToken {
    TokenIds ids;
    TokenWeights weights;
    std::uint32_t source;  // encode_source of slot 0
};

__device__ __forceinline__ void write_row(const layout::RouteParams& p, const LaneToken& t, int slot,
                                          std::uint32_t where, std::uint32_t*& list) {
    p.slots[where] = std::uint64_t{t.weights.bits[slot]} << 32 |
                     (t.source | layout::encode_source(0, 0, static_cast<std::uint32_t>(slot)));
    *list++ = where;
}

// A token that names an expert twice has two rows there, which lane masks cannot count: one lane after the
// other then.
__device__ __forceinline__ void write_serially(const layout::RouteParams& p, const WarpColumns& c,
                                               const LaneToken& t, std::uint32_t* list) {
    const LocalIds local = local_ids(p);
#pragma unroll 1
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
        if (ptx::lane_id() == lane) {
#pragma unroll
            for (int slot = 0; slot < kMaxTopK; ++slot) {
                if (slot >= p.top_k) break;
                const std::uint32_t expert = local(t.ids[slot]);
                if (local.holds(expert)) write_row(p, t, slot, c.next[expert]++, list);
            }
        }
        __syncwarp();
    }
}

// One warp, a token to a lane; `next_row` is where the warp's rows in slot_list go on. Returns their number.
__device__ __forceinline__ std::uint32_t place_step(const layout::RouteParams& p, const WarpColumns& c,
                                                    const LaneToken& t, std::uint32_t next_row) {
    const LocalIds local = local_ids(p);
    const std::uint32_t own = 1u << ptx::lane_id();
    std::uint32_t twice = 0;
    Resident r{0, local.num_local, 0};
#pragma unroll
    for (int four = 0; four < kMaxTopK; four += kSlotsAtOnce) {
        if (four >= p.top_k) break;
        std::uint32_t before[kSlotsAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i) {
            const std::uint32_t expert = local(t.ids[four + i]);
            const bool held = local.holds(expert);
            if (held) before[i] = atomicOr(c.lanes + expert, own);
            r.add(held, expert);
        }
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i)
            twice |= before[i] & own;
    }
    const std::uint32_t rows = r.rows;
    const std::uint32_t first = static_cast<std::uint32_t>(layout::column_of_first(p.num_local)) + r.first;
    const std::uint32_t last = static_cast<std::uint32_t>(layout::column_of_last(p.num_local)) + r.last;
    if (rows > 0) {
        atomicOr(c.lanes + first, own);
        atomicOr(c.lanes + last, own);
    }
    const std::uint32_t up_to = ptx::inclusive_sum(rows);
    __syncwarp();
    const bool serial = ptx::any(twice != 0);
    const std::uint32_t lower = ptx::lower_lanes();
    const auto where = [&](std::uint32_t column) {
        return c.next[column] + static_cast<std::uint32_t>(__popc(c.lanes[column] & lower));
    };
    const std::uint32_t list = next_row + up_to - rows;
    if (rows > 0) {
        const std::uint64_t entry =
            std::uint64_t{list} << 32 | (t.source | layout::encode_source(0, 0, rows - 1));
        const std::uint32_t pull = where(first);
        const std::uint32_t push = where(last);
        p.pull_list[pull] = entry;
        p.push_list[push] = entry;
    }
    if (serial) {
        write_serially(p, c, t, p.slot_list + list);
    } else {
        std::uint32_t* out = p.slot_list + list;
        // Sums before stores, which the compiler would not change places with; a slot without an expert here
        // reads the first column rather than branch.
#pragma unroll
        for (int four = 0; four < kMaxTopK; four += kSlotsAtOnce) {
            if (four >= p.top_k) break;
            std::uint32_t at[kSlotsAtOnce];
#pragma unroll
            for (int i = 0; i < kSlotsAtOnce; ++i) {
                const std::uint32_t expert = local(t.ids[four + i]);
                at[i] = where(local.holds(expert) ? expert : 0);
            }
#pragma unroll
            for (int i = 0; i < kSlotsAtOnce; ++i)
                if (local.holds(local(t.ids[four + i]))) write_row(p, t, four + i, at[i], out);
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = static_cast<int>(ptx::lane_id()); i < 3 * p.num_local; i += 32) {
        const std::uint32_t lanes = c.lanes[i];
        c.lanes[i] = 0;
        if (!serial || i >= p.num_local) c.next[i] += static_cast<std::uint32_t>(__popc(lanes));
    }
    __syncwarp();
    return ptx::from_lane(up_to, 31);
}

// One warp: all entries of its run. m.rows holds what came before the warp in the CTA, m.counts what came
// before the CTA. `ids` are those of the run when it is a single step.
__device__ __forceinline__ void place_run(const layout::RouteParams& p, RouteMemory& m, const WarpRun& run,
                                          const TokenIds& ids) {
    if (run.first >= run.end) return;
    const int columns = layout::num_columns(p.num_local);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const WarpColumns c{m.rows + warp * columns, m.masks + warp * layout::column_of_rows(p.num_local)};
    const bool one_step = run.is_one_step();
    // The ids of a step are on their way while the step before it is placed.
    Place at = place_in_run(p, m.state, run, run.first);
    TokenIds current = ids;
    if (!one_step) current = lane_ids(p, m.state, at, false);
#pragma unroll 1
    for (int i = static_cast<int>(ptx::lane_id()); i < 3 * p.num_local; i += 32) {
        c.next[i] += m.counts[i];
        c.lanes[i] = 0;
    }
    const int rows = layout::column_of_rows(p.num_local);
    std::uint32_t next_row = c.next[rows] + m.counts[rows];
    __syncwarp();
#pragma unroll 1
    for (int first = run.first; first < run.end; first += 32) {
        LaneToken t;
        t.ids = current;
        t.source = layout::encode_source(static_cast<std::uint32_t>(at.token),
                                         static_cast<std::uint32_t>(at.rank), 0);
        t.weights = TokenWeights{};
        // On their way while the warp counts. Most tokens of many ranks have no expert here.
        if (has_local(p, t.ids)) t.weights = token_weights(p, at.rank, at.token, m.state.epoch);
        if (!one_step) {
            at = place_in_run(p, m.state, run, first + 32);
            current = lane_ids(p, m.state, at, false);
        }
        next_row += place_step(p, c, t, next_row);
    }
}

}  // namespace mega_moe::device
