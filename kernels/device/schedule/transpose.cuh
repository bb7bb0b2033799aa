#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "device/schedule/backward_tile.cuh"

namespace mega_moe::device {

// Tiles that transpose x and dy: a ticket's record, and whether its rows are there in bf16, which come behind
// their codes. In the order of the units, without waiting for any other tile.
template <class C>
class TransposesOfRank {
  public:
    __device__ __forceinline__ TransposesOfRank(const layout::BackwardParams& params, int num_chunks)
        : p(params),
          rows_(params.route.expert_rows, num_chunks * params.route.num_local),
          walk_(num_chunks * params.route.num_local, params.route.num_local, params.transposes.columns(), 0,
                0) {
        advance();
    }

    __device__ __forceinline__ bool find(int ticket) {
        ticket_ = ticket;
        while (run_.tiles > 0 && ticket >= run_.first_ticket + run_.tiles)
            advance();
        if (run_.tiles == 0) return false;
        place_.move(p, run_.unit);
        return true;
    }
    __device__ __forceinline__ BackwardTile record(int cta) const {
        const layout::CtaTile tile = cta_tile(cta);
        BackwardTile t{};
        t.kind = kTransposeTile;
        t.k_blocks = p.transposes.blocks();
        t.slot = place_.first_slot + tile.first_row;
        t.pool_row = t.slot + place_.row_of_slot;
        t.rows = tile.live ? min(run_.rows - tile.first_row, layout::kTileRows) : 0;
        t.column = p.transposes.first_column(tile.column);
        t.row = p.transposes.is_dy(tile.column) ? 1 : 0;
        t.chunk = place_.chunk;
        t.expert = place_.expert;
        return t;
    }
    // One warp.
    __device__ __forceinline__ bool ready(std::uint64_t& index, std::uint64_t& seen,
                                          std::uint64_t& wanted) const {
        const int row = cta_tile(0).first_row + static_cast<int>(ptx::lane_id()) * layout::kRowBlock;
        index = static_cast<std::uint64_t>((place_.first_slot + row) / layout::kRowBlock);
        wanted = layout::kRowBlock;
        seen = wanted;
        if (row < min(run_.rows, cta_tile(1).first_row + layout::kTileRows))
            seen = ptx::load_acquire_gpu(p.counters + p.arrived + index) / layout::kBf16RowThere;
        return !ptx::any(seen < wanted);
    }

  private:
    __device__ __forceinline__ void advance() {
        // The runs that TileWalk has for a second GEMM are empty.
        do {
            run_ = walk_.next(rows_);
        } while (run_.tiles == 0 && run_.rows > 0);
    }
    __device__ __forceinline__ layout::CtaTile cta_tile(int cta) const {
        return layout::cta_tile(ticket_ - run_.first_ticket, cta, run_.rows, p.transposes.columns());
    }

    const layout::BackwardParams& p;
    UnitRows rows_;
    layout::TileWalk walk_;
    layout::TileRun run_{};
    UnitPlace place_{};
    int ticket_ = 0;
};
struct NoTransposes {
    __device__ __forceinline__ NoTransposes(const layout::BackwardParams&, int) {}
};

}  // namespace mega_moe::device
