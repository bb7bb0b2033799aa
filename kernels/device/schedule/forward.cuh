#pragma once
#include <cstdint>

#include "device/comm/wait.cuh"
#include "device/common/ring_cursor.cuh"
#include "device/common/trace.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/schedule/unit_rows.cuh"
#include "layout/forward_params.h"
#include "layout/layer_shared.h"
#include "layout/tiles.h"
#include "layout/workspace.h"

namespace mega_moe::device {

// A tile as the scheduler passes it to the other warps of its CTA.
struct TileRecord {
    std::int32_t kind;  // TileKind
    std::int32_t k_blocks;
    std::int32_t pool_row;      // first row in the pools
    std::int32_t slot;          // the same as a slot
    std::int32_t input_rows;    // valid rows that it reads, 1 to layout::kTileRows
    std::int32_t rows;          // the same, or 0: nothing is stored
    std::int32_t weight_row;    // of the first half of the columns, in the weights' map
    std::int32_t weight_row_2;  // of the second
    std::int32_t column;        // first column of what is stored
    std::int32_t tail;          // the cluster shares the rows, not the weights
    std::int32_t chunk;
    std::int32_t expert;
    std::int32_t column_block;
};
enum TileKind { kNoTile, kGateUpTile, kDownTile };

// Tiles that gate/up lies ahead of down, in tiles of every cluster: one that is multiplied, one that is
// stored, and one more.
inline constexpr int kLagPerCluster = 3;

// One warp of each CTA: the tickets of the cluster. The first CTA draws them and passes them to the second.
template <class C>
class Tickets {
  public:
    __device__ __forceinline__ Tickets(const layout::ForwardParams& p, const typename C::Smem& shared,
                                       int cta)
        : shared_(shared), cta_(cta), clusters_(static_cast<int>(ptx::num_ctas()) / C::kClusterSize) {
        counter_ = p.counters + layout::kTileTicket * layout::kCounterLine;
    }

    // A cluster's first tile needs no draw, which would take a microsecond.
    __device__ __forceinline__ int first() const { return static_cast<int>(ptx::cta_id()) / C::kClusterSize; }

    __device__ __forceinline__ int next() {
        std::uint32_t ticket = 0;
        if (ptx::lane_id() == 0) {
            if (cta_ == 0) {
                ticket = ptx::fetch_add_relaxed_gpu(counter_, 1) + static_cast<std::uint32_t>(clusters_);
                ptx::send_shared_at(shared_.mailbox_word(mail_.at), shared_.mailbox_barrier(mail_.at), 1,
                                    ticket);
            } else {
                ptx::mbarrier_arrive_expect(shared_.mailbox_barrier(mail_.at), 4);
                ptx::mbarrier_wait(shared_.mailbox_barrier(mail_.at), mail_.parity);
                ticket = *static_cast<volatile std::uint32_t*>(shared_.mailbox_value(mail_.at));
            }
        }
        mail_.next();
        return static_cast<int>(ptx::from_lane(ticket, 0));
    }

  private:
    const typename C::Smem& shared_;
    int cta_;
    int clusters_;
    std::uint32_t* counter_;
    RingCursor<layout::kMailbox> mail_;
};

// One thread: until the rows that a tile reads are there. After a fault nothing is there any more, and the
// launch runs to its end without waiting.
template <class C>
__device__ __forceinline__ void await_input(const layout::ForwardParams& p, std::uint64_t epoch,
                                            const TileRecord& t, bool& lost) {
    const layout::Endpoint& e = p.route.endpoint;
    const bool down = t.kind == kDownTile;
    const std::int64_t first = t.slot / layout::kRowBlock;
    for (int row = 0; row < t.input_rows && !lost; row += layout::kRowBlock) {
        const std::int64_t block = first + row / layout::kRowBlock;
        const std::uint32_t* counter = p.counters + (down ? p.gate_up_done : p.arrived) + block;
        // Each warp of a warpgroup counts each block of columns of gate/up that it has stored.
        const auto wanted =
            static_cast<std::uint64_t>(down ? p.intermediate / C::kGateUpColumns * layout::kStoringWarps
                                            : min(t.input_rows - row, layout::kRowBlock));
        const auto load = [&] { return static_cast<std::uint64_t>(ptx::load_acquire_gpu(counter)); };
        std::uint64_t seen;
        if (wait_for(e, load, wanted, e.progress_ns, seen)) continue;
        give_up(e, epoch,
                {Role::kTileInput, Kind::kProgress, static_cast<std::uint64_t>(block), seen, wanted});
        lost = true;
    }
}

// One warp: the tiles of this CTA, one after another, each once its inputs are there. The loading warp then
// needs no look at global memory, which would leave the stages empty between tiles.
template <class C>
__device__ __forceinline__ void schedule_tiles(const layout::ForwardParams& p, const typename C::Smem& shared,
                                               std::uint64_t epoch, int cta) {
    const layout::RouteParams& r = p.route;
    const int clusters = static_cast<int>(ptx::num_ctas()) / C::kClusterSize;
    const int num_chunks = table_word(r.summary, layout::kSummaryChunks);
    const int gate_up_columns = p.intermediate / C::kGateUpColumns;
    const int down_columns = p.hidden / C::kBlockN;
    UnitRows rows(r.expert_rows, num_chunks * r.num_local);
    layout::TileWalk walk(num_chunks * r.num_local, r.num_local, gate_up_columns, down_columns,
                          kLagPerCluster * clusters);
    layout::TileRun run = walk.next(rows);
    Tickets<C> tickets(p, shared, cta);
    int first_slot = 0;
    int row_of_slot = 0;  // row in the pools minus slot
    int placed_unit = -1;
    bool lost = false;
    RingCursor<C::kRing> ring;
    for (int ticket = tickets.first();; ticket = tickets.next()) {
        while (run.tiles > 0 && ticket >= run.first_ticket + run.tiles)
            run = walk.next(rows);
        TileRecord record{};
        if (run.tiles > 0) {
            const int chunk = run.unit / r.num_local;
            const int expert = run.unit - chunk * r.num_local;
            if (run.unit != placed_unit) {
                placed_unit = run.unit;
                first_slot = table_word(r.expert_slots, run.unit);
                const std::int32_t* row = r.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
                row_of_slot = static_cast<int>(layout::chunk_first_row(chunk, p.pool_rows)) -
                              table_word(row, layout::kChunkFirstSlot);
            }
            const int columns = run.down ? down_columns : gate_up_columns;
            const layout::CtaTile tile = layout::cta_tile(ticket - run.first_ticket, cta, run.rows, columns);
            // A CTA without a tile helps to load the other's rows, and any column does for it.
            const int column = tile.live ? tile.column : 0;
            record.kind = run.down ? kDownTile : kGateUpTile;
            record.k_blocks = (run.down ? p.intermediate : p.hidden) / C::kBlockK;
            record.slot = first_slot + tile.first_row;
            record.pool_row = record.slot + row_of_slot;
            record.input_rows = min(run.rows - tile.first_row, layout::kTileRows);
            record.rows = tile.live ? record.input_rows : 0;
            record.weight_row = run.down ? expert * p.hidden + column * C::kBlockN
                                         : expert * 2 * p.intermediate + column * C::kGateUpColumns;
            record.weight_row_2 = record.weight_row + (run.down ? C::kBlockN / 2 : p.intermediate);
            record.column = column * (run.down ? C::kBlockN : C::kGateUpColumns);
            record.tail = tile.tail;
            record.chunk = chunk;
            record.expert = expert;
            record.column_block = column;
        }
        ptx::mbarrier_wait(shared.ring_empty(ring.at), ring.parity ^ 1);
        if (ptx::lane_id() == 0) {
            if (record.kind != kNoTile) await_input<C>(p, epoch, record, lost);
            *reinterpret_cast<TileRecord*>(shared.record(ring.at)) = record;
            ptx::mbarrier_arrive(shared.ring_full(ring.at));
        }
        __syncwarp();
        ring.next();
        if (record.kind == kNoTile) return;
    }
}

// How a trace numbers the tiles: block of rows in the low 16 bits, of columns in the next 8.
__device__ __forceinline__ int trace_index(const TileRecord& t, int first_row) {
    return (t.slot + first_row) / layout::kRowBlock | t.column_block << 16;
}

}  // namespace mega_moe::device
