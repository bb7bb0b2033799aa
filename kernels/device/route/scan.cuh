#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/route/count.cuh"

// Where the entries of a CTA go, from the counts of all CTAs. Runs after the grid barrier.
namespace mega_moe::device {

// Exclusive sums of values [0, count), in place, by one warp; `Padded` rounds each value up to whole row
// blocks first. Returns the sum of all, to every lane.
template <bool Padded>
__device__ __forceinline__ std::uint32_t warp_exclusive_sums(std::uint32_t* values, int count) {
    const auto padded = [](std::uint32_t v) {
        return Padded ? (v + layout::kPadRows - 1) / layout::kPadRows * layout::kPadRows : v;
    };
    // Each lane takes a run of neighbors: one exchange between lanes for all of them.
    const int run = (count + 31) / 32;
    const int first = min(static_cast<int>(ptx::lane_id()) * run, count);
    const int end = min(first + run, count);
    std::uint32_t own = 0;
    for (int i = first; i < end; ++i)
        own += padded(values[i]);
    const std::uint32_t up_to = ptx::inclusive_sum(own);
    std::uint32_t before = up_to - own;
    for (int i = first; i < end; ++i) {
        const std::uint32_t v = padded(values[i]);
        values[i] = before;
        before += v;
    }
    return ptx::from_lane(up_to, 31);
}

// Sum of `rows` words of a column. Eight loads are in flight at a time: more would not fit into the registers
// of a thread of the largest CTA.
__device__ __forceinline__ std::uint32_t sum_column(const std::uint32_t* column, int stride, int rows) {
    std::uint32_t total = 0;
#pragma unroll 1
    for (int first = 0; first < rows; first += 8) {
        std::uint32_t v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = first + i < rows ? ptx::load_relaxed_gpu(column + std::int64_t{first + i} * stride) : 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            total += v[i];
    }
    return total;
}

// One column of the counts, summed over CTAs.
struct ColumnSums {
    const std::uint32_t* groups;  // of this launch, at the column
    const std::uint32_t* ctas;    // at the column
    int columns;
    int used_ctas;

    __device__ __forceinline__ std::uint32_t all() const {
        return sum_column(groups, columns, (used_ctas + layout::kCtasPerGroup - 1) / layout::kCtasPerGroup);
    }
    // Counts of the CTAs before `cta`.
    __device__ __forceinline__ std::uint32_t before(int cta) const {
        const int group = cta / layout::kCtasPerGroup;
        const int first = group * layout::kCtasPerGroup;
        return sum_column(groups, columns, group) +
               sum_column(ctas + std::int64_t{first} * columns, columns, cta - first);
    }
};

__device__ __forceinline__ ColumnSums column_sums(const layout::RouteParams& p, std::uint64_t epoch,
                                                  int used_ctas, int column) {
    const int columns = layout::num_columns(p.num_local);
    const std::int64_t bank = static_cast<std::int64_t>(epoch % 2) * layout::kMaxGroups;
    return {p.group_counts + bank * columns + column, p.cta_counts + column, columns, used_ctas};
}

// All threads: rows before each block and of all, from which every CTA finds the same chunk cuts.
template <int Threads>
__device__ __forceinline__ void sum_blocks(const layout::RouteParams& p, RouteMemory& m, const CtaRange& r,
                                           int used_ctas, int blocks) {
    const int columns = layout::num_columns(p.num_local);
    const int rows = layout::column_of_rows(p.num_local);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < used_ctas; i += Threads)
        m.cta_rows[i] = ptx::load_relaxed_gpu(p.cta_counts + std::int64_t{i} * columns + rows);
    __syncthreads();
    if (threadIdx.x < 32) {
        const std::uint32_t all = warp_exclusive_sums<false>(m.cta_rows, used_ctas);
        if (threadIdx.x == 0) m.state.all_rows = all;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < blocks; i += Threads) {
        const int cta = i * layout::kBlockTokens / r.range_tokens;
        m.before[i] =
            m.cta_rows[cta] + ptx::load_relaxed_gpu(p.block_counts + std::int64_t{i} * columns + rows);
    }
    __syncthreads();
}

// The block after the last of the chunk that starts at block `first`: the longest run within the limit.
__device__ __forceinline__ int chunk_end(const layout::RouteParams& p, const RouteMemory& m, int first,
                                         int blocks) {
    if (p.one_chunk || blocks == 0 || m.state.all_rows <= p.most_in_one) return blocks;
    const std::int64_t most = m.before[first] + p.chunk_limit;
    if (m.state.all_rows <= most) return blocks;
    int fits = first + 1;  // a single block always does
    int beyond = blocks;
    while (beyond - fits > 1) {
        const int middle = (fits + beyond) / 2;
        if (m.before[middle] <= most)
            fits = middle;
        else
            beyond = middle;
    }
    return fits;
}

// A chunk as blocks [first, end), and the CTA's tokens in it.
struct Segment {
    int chunk;
    int first_block;
    int end_block;
    int first;
    int end;
    bool starts_here;  // the CTA writes the chunk's tables
};

// All threads: leaves in m.counts where the CTA's next entry of each column goes, and writes the chunk's
// tables.
template <int Threads>
__device__ __forceinline__ void place_columns(const layout::RouteParams& p, RouteMemory& m, const CtaRange& r,
                                              const Segment& s, int used_ctas, int blocks) {
    const int num_local = p.num_local;
    const int columns = layout::num_columns(num_local);
    const int thread = static_cast<int>(threadIdx.x);
    std::uint32_t* scans = m.masks;
    const std::int64_t table = std::int64_t{s.chunk} * num_local;
    const auto at_block = [&](const ColumnSums& sums, int block, int column) {
        return sums.before(block * layout::kBlockTokens / r.range_tokens) +
               ptx::load_relaxed_gpu(p.block_counts + std::int64_t{block} * columns + column);
    };
#pragma unroll 1
    for (int i = thread; i < columns; i += Threads) {
        const ColumnSums sums = column_sums(p, m.state.epoch, used_ctas, i);
        const std::uint32_t start = s.first_block == 0 ? 0 : at_block(sums, s.first_block, i);
        const std::uint32_t end = s.end_block == blocks ? sums.all() : at_block(sums, s.end_block, i);
        const std::uint32_t own = s.starts_here ? start : sums.before(static_cast<int>(blockIdx.x));
        if (i < 3 * num_local) {
            m.counts[i] = own - start;
            scans[i] = end - start;
            if (s.starts_here && i < num_local)
                p.expert_rows[table + i] = static_cast<std::int32_t>(end - start);
        } else if (i == layout::column_of_rows(num_local)) {
            m.counts[i] = own;
            m.state.rows_before = start;
            m.state.chunk_rows = end - start;
        } else {
            m.state.residents_before = start;
            m.state.chunk_residents = end - start;
        }
        if (blockIdx.x == 0 && s.chunk == 0) {
            const std::uint32_t all = s.end_block == blocks ? end : sums.all();
            p.summary[layout::kSummaryWords + p.endpoint.num_ranks + i] = static_cast<std::int32_t>(all);
        }
    }
    __syncthreads();
    if (thread < 32) {
        const std::uint32_t padded = warp_exclusive_sums<true>(scans, num_local);
        if (thread == 0) m.state.padded_rows = padded;
    } else if (thread < 96) {
        warp_exclusive_sums<false>(scans + thread / 32 * num_local, num_local);
    }
    __syncthreads();
    const auto first_slot =
        static_cast<std::uint32_t>(layout::chunk_first_slot(m.state.rows_before, s.chunk, num_local));
#pragma unroll 1
    for (int i = thread; i < 3 * num_local; i += Threads) {
        const std::uint32_t start = scans[i] + (i < num_local ? first_slot : m.state.residents_before);
        m.counts[i] += start;
        if (!s.starts_here) continue;
        std::int32_t* out = i < num_local       ? p.expert_slots
                            : i < 2 * num_local ? p.pull_starts - num_local
                                                : p.push_starts - 2 * num_local;
        out[table + i] = static_cast<std::int32_t>(start);
    }
    if (s.starts_here && thread == 0) {
        std::int32_t* row = p.chunk_table + std::int64_t{s.chunk} * layout::kChunkWords;
        row[layout::kChunkFirstToken] = s.first_block * layout::kBlockTokens;
        row[layout::kChunkEndToken] = min(s.end_block * layout::kBlockTokens, m.state.most_tokens);
        row[layout::kChunkFirstSlot] = static_cast<std::int32_t>(first_slot);
        row[layout::kChunkSlots] = static_cast<std::int32_t>(m.state.padded_rows);
        row[layout::kChunkRows] = static_cast<std::int32_t>(m.state.chunk_rows);
        row[layout::kChunkFirstResident] = static_cast<std::int32_t>(m.state.residents_before);
        row[layout::kChunkResidents] = static_cast<std::int32_t>(m.state.chunk_residents);
        row[layout::kChunkWords - 1] = 0;
    }
    __syncthreads();
}

}  // namespace mega_moe::device
