#pragma once
#include <cstdint>

#include "device/ptx/warp.cuh"
#include "device/role/route_scan.cuh"

// The entries of a tile: each warp ranks its tokens by expert, the CTA sums over its warps, each thread
// writes.
namespace mega_moe::device {

// Number of a token's rows that come before it in its warp, by slot: 16 bits each, two in a register.
struct SlotRanks {
    std::uint32_t pair[kMaxTopK / 2];

    __device__ __forceinline__ void set(int slot, std::uint32_t rank) {
        pair[slot / 2] = slot % 2 == 0 ? rank : pair[slot / 2] | rank << 16;
    }
    __device__ __forceinline__ std::uint32_t operator[](int slot) const {
        return slot % 2 == 0 ? pair[slot / 2] & 0xFFFFu : pair[slot / 2] >> 16;
    }
};

struct Ranked {
    SlotRanks slots;
    std::uint32_t rows;         // of the token on this rank
    std::uint32_t rows_before;  // in the warp
    std::uint32_t first;        // local experts; only with rows > 0
    std::uint32_t last;
    std::uint32_t rank_of_first;  // among the warp's tokens with the same first local expert
    std::uint32_t rank_of_last;
};

// A token that names an expert twice has two rows there, which lane masks cannot count: one lane after the
// other then.
__device__ __forceinline__ void rank_serially(const RouteParams& p, std::uint32_t* row, const TokenIds& ids,
                                              Ranked& r) {
    const LocalIds local = local_ids(p);
    for (int i = static_cast<int>(ptx::lane_id()); i < p.num_local; i += 32)
        row[i] = 0;
    __syncwarp();
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
        if (ptx::lane_id() == lane) {
#pragma unroll
            for (int slot = 0; slot < kMaxTopK; ++slot) {
                if (slot >= p.top_k) break;
                const std::uint32_t expert = local(ids[slot]);
                if (local.holds(expert))
                    r.slots.set(slot, row[expert]++);
                else
                    r.slots.set(slot, 0);
            }
        }
        __syncwarp();
    }
}

// One warp, over its row of m.rows: leaves there how many rows or tokens of the warp each column has.
__device__ __forceinline__ Ranked rank_in_warp(const RouteParams& p, std::uint32_t* row,
                                               const TokenIds& ids) {
    const LocalIds local = local_ids(p);
    const int columns = 3 * p.num_local;
    const auto lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
    for (int i = lane; i < columns; i += 32)
        row[i] = 0;
    __syncwarp();
    Ranked r{};
    r.first = local.num_local;
    const std::uint32_t own = 1u << lane;
    std::uint32_t twice = 0;
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot >= p.top_k) break;
        const std::uint32_t expert = local(ids[slot]);
        if (!local.holds(expert)) continue;
        twice |= atomicOr(row + expert, own) & own;
        r.first = min(r.first, expert);
        r.last = max(r.last, expert);
        ++r.rows;
    }
    std::uint32_t* firsts = row + layout::column_of_first(p.num_local);
    std::uint32_t* lasts = row + layout::column_of_last(p.num_local);
    if (r.rows > 0) {
        atomicOr(firsts + r.first, own);
        atomicOr(lasts + r.last, own);
    }
    __syncwarp();
    const bool serial = ptx::any(twice != 0);
    const std::uint32_t lower = ptx::lower_lanes();
    const auto ranked = [&](std::uint32_t lanes) {
        return static_cast<std::uint32_t>(__popc(lanes & lower));
    };
    if (!serial) {
#pragma unroll
        for (int slot = 0; slot < kMaxTopK; ++slot) {
            if (slot >= p.top_k) break;
            const std::uint32_t expert = local(ids[slot]);
            r.slots.set(slot, local.holds(expert) ? ranked(row[expert]) : 0);
        }
    }
    if (r.rows > 0) {
        r.rank_of_first = ranked(firsts[r.first]);
        r.rank_of_last = ranked(lasts[r.last]);
    }
    __syncwarp();
    if (serial) rank_serially(p, row, ids, r);
#pragma unroll 1
    for (int i = lane + (serial ? p.num_local : 0); i < columns; i += 32)
        row[i] = static_cast<std::uint32_t>(__popc(row[i]));
    const std::uint32_t up_to = ptx::inclusive_sum(r.rows);
    r.rows_before = up_to - r.rows;
    if (lane == 31) row[columns] = up_to;
    return r;
}

// All threads: turns the counts of each warp into where its next entries go, and moves the CTA's on to the
// next tile.
template <int Threads>
__device__ __forceinline__ void place_warps(const RouteParams& p, RouteMemory& m, int warps) {
    const int stride = layout::row_stride(p.num_local);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < stride; i += Threads) {
        std::uint32_t next = m.counts[i];
#pragma unroll 4
        for (int warp = 0; warp < warps; ++warp) {
            const std::uint32_t count = m.rows[warp * stride + i];
            m.rows[warp * stride + i] = next;
            next += count;
        }
        m.counts[i] = next;
    }
}

__device__ __forceinline__ void write_entries(const RouteParams& p, const std::uint32_t* row,
                                              const TokenIds& ids, const TokenWeights& weights,
                                              const Ranked& r, const Place& at) {
    const LocalIds local = local_ids(p);
    const auto token = static_cast<std::uint32_t>(at.token);
    const auto rank = static_cast<std::uint32_t>(at.rank);
    const std::uint32_t first = row[layout::column_of_rows(p.num_local)] + r.rows_before;
    const std::uint64_t entry = layout::encode_resident(token, rank, r.rows, first);
    p.pull_list[row[layout::column_of_first(p.num_local) + r.first] + r.rank_of_first] = entry;
    p.push_list[row[layout::column_of_last(p.num_local) + r.last] + r.rank_of_last] = entry;
    std::uint32_t* list = p.slot_list + first;
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot) {
        if (slot >= p.top_k) break;
        const std::uint32_t expert = local(ids[slot]);
        if (!local.holds(expert)) continue;
        const std::uint32_t where = row[expert] + r.slots[slot];
        p.slots[where] = std::uint64_t{weights.bits[slot]} << 32 |
                         layout::encode_source(token, rank, static_cast<std::uint32_t>(slot));
        *list++ = where;
    }
}

// All threads: the tile of tokens [first, first + tile_tokens), of which those below `end` are in the chunk.
template <int Threads>
__device__ __forceinline__ void place_tile(const RouteParams& p, RouteMemory& m, const CtaRange& range,
                                           const Place& at, const TokenIds& ids) {
    const int warps = (range.tile_tokens * p.endpoint.num_ranks + 31) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    std::uint32_t* row = m.rows + warp * layout::row_stride(p.num_local);
    // On their way while the warps count. Most tokens of many ranks have no expert here.
    TokenWeights weights{};
    if (has_local(p, ids)) weights = token_weights(p, at.rank, at.token, m.state.epoch);
    Ranked r{};
    if (warp < warps) r = rank_in_warp(p, row, ids);
    __syncthreads();
    place_warps<Threads>(p, m, warps);
    __syncthreads();
    if (r.rows > 0) write_entries(p, row, ids, weights, r, at);
    __syncthreads();
}

}  // namespace mega_moe::device
