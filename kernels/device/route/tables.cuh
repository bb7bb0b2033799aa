#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "layout/layer_params.h"
#include "layout/pools.h"
#include "layout/workspace.h"

// What a launch reads of the routing tables: chunks, and the tokens of each with their slots, in order.
namespace mega_moe::device {

__device__ __forceinline__ std::int32_t table_word(const std::int32_t* table, std::int64_t at) {
    return static_cast<std::int32_t>(
        ptx::load_relaxed_gpu(reinterpret_cast<const std::uint32_t*>(table + at)));
}

// One chunk as the communication warps see it.
struct ChunkView {
    int first_resident;
    int residents;
    int rows;
    int row_of_slot;  // row in the pools minus slot
};

__device__ __forceinline__ ChunkView view_chunk(const layout::LayerParams& p, int chunk) {
    const std::int32_t* row = p.route.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
    return {table_word(row, layout::kChunkFirstResident), table_word(row, layout::kChunkResidents),
            table_word(row, layout::kChunkRows),
            static_cast<int>(layout::chunk_first_row(chunk, p.pool_rows)) -
                table_word(row, layout::kChunkFirstSlot)};
}

// A token and, in lane i, the i-th slot of the pool that its row is for or comes from.
struct TokenRows {
    int token;
    int rank;
    int rows;
    int slot;
};

__device__ __forceinline__ TokenRows rows_of_entry(const layout::RouteParams& r, std::uint64_t entry) {
    const auto low = static_cast<std::uint32_t>(entry);
    TokenRows t{};
    t.token = static_cast<int>(low & 0xFFFFF);
    t.rank = static_cast<int>(low >> 20 & 31);
    t.rows = static_cast<int>(low >> 25 & 15) + 1;
    const auto lane = static_cast<int>(ptx::lane_id());
    if (lane < t.rows) t.slot = static_cast<int>(ptx::load_relaxed_gpu(r.slot_list + (entry >> 32) + lane));
    return t;
}

// Tokens of a chunk in the order of pull_list, every `step`-th. Entries are loaded 32 at a time and slots one
// token ahead, since each load takes as long as a row does.
class TokensInOrder {
  public:
    __device__ __forceinline__ TokensInOrder(const layout::LayerParams& p, const ChunkView& view, int first,
                                             int step)
        : r_(p.route),
          list_(p.route.pull_list + view.first_resident),
          end_(view.residents),
          at_(first),
          step_(step) {
        if (at_ < end_) ahead_ = load();
    }
    __device__ __forceinline__ bool next(TokenRows& t) {
        if (at_ >= end_) return false;
        t = ahead_;
        at_ += step_;
        if (at_ < end_) ahead_ = load();
        return true;
    }

  private:
    __device__ __forceinline__ TokenRows load() {
        if (held_ % 32 == 0) {
            const std::int64_t mine = at_ + std::int64_t{ptx::lane_id()} * step_;
            window_ = mine < end_ ? ptx::load_relaxed_gpu(list_ + mine) : 0;
        }
        const std::uint64_t entry = __shfl_sync(ptx::kAllLanes, window_, held_ % 32);
        ++held_;
        return rows_of_entry(r_, entry);
    }

    const layout::RouteParams& r_;
    const std::uint64_t* list_;
    int end_;
    int at_;
    int step_;
    int held_ = 0;
    std::uint64_t window_ = 0;
    TokenRows ahead_{};
};

}  // namespace mega_moe::device
