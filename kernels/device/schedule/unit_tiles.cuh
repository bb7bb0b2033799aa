#pragma once
#include "device/schedule/unit_rows.cuh"
#include "layout/backward_params.h"
#include "layout/tiles.h"

namespace mega_moe::device {

// Walks the tiles of the units' rows by ticket. A unit's tiles lie in two runs, which are `first_columns` and
// `second_columns` tiles wide; the second lies `lag` tiles behind the first.
template <class C>
class UnitTiles {
  public:
    // Tickets in ascending order. False: there are no more.
    __device__ __forceinline__ bool find(int ticket) {
        ticket_ = ticket;
        while (run_.tiles > 0 && ticket >= run_.first_ticket + run_.tiles)
            advance();
        if (run_.tiles == 0) return false;
        place_.move(p, run_.unit);
        return true;
    }

  protected:
    __device__ __forceinline__ UnitTiles(const layout::BackwardParams& params, int num_chunks,
                                         int first_columns, int second_columns, int lag)
        : p(params),
          rows_(params.route.expert_rows, num_chunks * params.route.num_local),
          walk_(num_chunks * params.route.num_local, params.route.num_local, first_columns, second_columns,
                lag) {
        advance();
    }

    const layout::BackwardParams& p;
    UnitRows rows_;
    layout::TileWalk walk_;
    layout::TileRun run_{};
    UnitPlace place_{};
    int ticket_ = 0;

  private:
    __device__ __forceinline__ void advance() {
        // A run without columns is empty.
        do {
            run_ = walk_.next(rows_);
        } while (run_.tiles == 0 && run_.rows > 0);
    }
};

}  // namespace mega_moe::device
