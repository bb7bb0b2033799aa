#pragma once
#include <cstdint>
#include <type_traits>

#include "device/comm/wait.cuh"
#include "device/common/trace.cuh"
#include "device/schedule/backward_tile.cuh"
#include "device/schedule/cluster_mailbox.cuh"
#include "device/schedule/transpose.cuh"
#include "device/schedule/unit_tiles.cuh"
#include "layout/saved_gate_up.h"
#include "layout/tiles.h"
#include "layout/workspace.h"

// Which tile a cluster takes next. Tiles of dz and dx come in the forward's lagged order and go first, since
// other ranks wait for them; tiles of the weights' gradients fill whatever time is left. A cluster holds the
// next ticket of either kind and takes the first of them whose inputs are there, so that no tile waits once
// it is taken. A held ticket waits for communication, lower tickets of its own kind and, if it is a
// gradient's, for tiles of the first kind: the lowest that is not done can always go on.
// Where gradients are of e4m3, tiles of a third kind transpose x and dy for them: they come between the
// others and wait for communication alone.
namespace mega_moe::device {

// Tiles of dz and dx: a ticket's record, and whether the rows that the cluster's tile reads are there.
template <class C>
class RowTiles : public UnitTiles<C> {
    using UnitTiles<C>::p;
    using UnitTiles<C>::run_;
    using UnitTiles<C>::place_;
    using UnitTiles<C>::ticket_;

  public:
    __device__ __forceinline__ RowTiles(const layout::BackwardParams& params, int num_chunks, int clusters)
        : UnitTiles<C>(params, num_chunks, params.intermediate / C::kGateUpColumns,
                       params.needs_dx ? params.hidden / C::kBlockN : 0, kLagPerCluster * clusters) {}

    __device__ __forceinline__ BackwardTile record(int cta) const {
        const layout::CtaTile tile = cta_tile(cta);
        // A CTA without a tile helps to load the other's rows; any column will do.
        const int column = tile.live ? tile.column : 0;
        BackwardTile t{};
        t.kind = run_.down ? kDxTile : kDzTile;
        t.k_blocks = (run_.down ? 2 * p.intermediate : p.hidden) / C::kBlockK;
        t.slot = place_.first_slot + tile.first_row;
        t.pool_row = t.slot + place_.row_of_slot;
        t.rows = tile.live ? min(run_.rows - tile.first_row, layout::kTileRows) : 0;
        t.weight_row = place_.expert * 2 * p.intermediate + (run_.down ? 0 : column * C::kGateUpColumns);
        t.weight_row_2 = t.weight_row + p.intermediate;
        t.down_row = place_.expert * p.hidden;
        t.column = column * (run_.down ? C::kBlockN : C::kGateUpColumns);
        t.tail = tile.tail;
        t.chunk = place_.chunk;
        t.expert = place_.expert;
        if constexpr (C::kSavesGateUp) {
            // As the CTAs share their loads, both GEMMs or one for both of them: of two tiles the second
            // has the higher slots.
            const int last = place_.first_slot + cta_tile(1).first_row;
            if (!run_.down && layout::is_saved(last, p.saved.slots)) t.flags = kSaved;
        }
        return t;
    }
    // One warp. Both CTAs' rows, since each waits for the other's loads.
    __device__ __forceinline__ bool ready(std::uint64_t& index, std::uint64_t& seen,
                                          std::uint64_t& wanted) const {
        const int first_row = cta_tile(0).first_row;
        const int row = first_row + static_cast<int>(ptx::lane_id()) * layout::kRowBlock;
        const int end = min(run_.rows, cta_tile(1).first_row + layout::kTileRows);
        index = static_cast<std::uint64_t>((place_.first_slot + row) / layout::kRowBlock);
        wanted = run_.down
                     ? static_cast<std::uint64_t>(p.intermediate / C::kGateUpColumns * layout::kStoringWarps)
                     : static_cast<std::uint64_t>(layout::kRowBlock);
        seen = wanted;
        if (row < end) seen = ptx::load_acquire_gpu(p.counters + (run_.down ? p.dz_done : p.arrived) + index);
        if constexpr (C::kQuantizesOnArrival) seen %= layout::kBf16RowThere;
        return !ptx::any(seen < wanted);
    }

  private:
    // How many tiles of each cluster dz is ahead of dx.
    static constexpr int kLagPerCluster = 3;

    __device__ __forceinline__ layout::CtaTile cta_tile(int cta) const {
        const int columns = run_.down ? p.hidden / C::kBlockN : p.intermediate / C::kGateUpColumns;
        return layout::cta_tile(ticket_ - run_.first_ticket, cta, run_.rows, columns);
    }
};

// wgrad tiles: a ticket's record, and whether its inputs are ready.
template <class C>
class GradientTilesOfRank {
  public:
    __device__ __forceinline__ GradientTilesOfRank(const layout::BackwardParams& params, int num_chunks,
                                                   bool bad)
        : p(params),
          rows_(params.route.expert_rows, num_chunks * params.route.num_local),
          walk_(num_chunks, params.route.num_local, params.gradients.tiles(), !params.accumulate),
          counts_chunks_(num_chunks > 2),
          bad_(bad) {
        run_ = walk_.next(rows_);
    }

    __device__ __forceinline__ bool find(int ticket) {
        ticket_ = ticket;
        while (run_.tiles > 0 && ticket >= run_.first_ticket + run_.tiles) {
            run_ = walk_.next(rows_);
            seen_blocks_ = 0;
        }
        if (run_.tiles == 0) return false;
        place_.move(p, run_.unit);
        return true;
    }
    __device__ __forceinline__ BackwardTile record(int cta) const {
        const layout::GradientTile tile = layout::gradient_tile(p.gradients, index(), cta);
        BackwardTile t{};
        t.kind = tile.down ? kDownGradient : kGateUpGradient;
        // An expert without rows has one empty stage: it is by their stages that the CTAs of a cluster keep
        // together, and that the first does not send more tickets than the second has room for.
        t.k_blocks = max(layout::ceil_div(run_.rows, kBlockRows), 1);
        t.slot = place_.first_slot + run_.first_row;
        t.pool_row = t.slot + place_.row_of_slot;
        t.rows = run_.rows;
        t.column = tile.column;
        t.chunk = place_.chunk;
        t.expert = place_.expert;
        t.row = tile.row;
        t.partial = run_.partial;
        t.part = part();
        t.flags = (run_.last ? 0 : kToPartials | kCountPart) | (run_.ordinal > 0 ? kFromPartials : 0) |
                  (bad_ ? kAllNan : 0) | (counts_chunks_ && run_.rows > 0 ? kCountChunk : 0);
        return t;
    }
    // One warp: all of the part's rows, and the part before. What was seen of the rows holds for later
    // tickets.
    __device__ __forceinline__ bool ready(std::uint64_t& index_of, std::uint64_t& seen,
                                          std::uint64_t& wanted) {
        // Where the contraction is cut into 128 rows, the zeros behind the last count too.
        const int blocks = layout::ceil_div(run_.rows, kBlockRows) * (kBlockRows / layout::kRowBlock);
        const int first = (place_.first_slot + run_.first_row) / layout::kRowBlock;
        wanted = static_cast<std::uint64_t>(p.intermediate / C::kGateUpColumns * layout::kStoringWarps);
        while (seen_blocks_ < blocks) {
            const int block = seen_blocks_ + static_cast<int>(ptx::lane_id());
            index_of = static_cast<std::uint64_t>(first + block);
            seen = block < blocks ? ptx::load_acquire_gpu(p.counters + p.dz_done + index_of) : wanted;
            if (ptx::any(seen < wanted)) return false;
            if constexpr (C::kFp8Wgrad) {
                const auto transposed =
                    static_cast<std::uint64_t>(p.transposes.columns() * layout::kTransposingWarps);
                const bool counts = block < blocks && index_of % 2 == 0;
                const std::uint64_t done =
                    counts ? ptx::load_acquire_gpu(p.counters + p.transposed + index_of) : transposed;
                if (ptx::any(done < transposed)) {
                    seen = done;
                    wanted = transposed;
                    return false;
                }
            } else if constexpr (C::kQuantizesOnArrival) {
                std::uint32_t rows = layout::kRowBlock;
                if (block < blocks)
                    rows = ptx::load_acquire_gpu(p.counters + p.arrived + index_of) / layout::kBf16RowThere;
                seen = rows;
                wanted = static_cast<std::uint64_t>(layout::kRowBlock);
                if (ptx::any(seen < wanted)) return false;
                wanted =
                    static_cast<std::uint64_t>(p.intermediate / C::kGateUpColumns * layout::kStoringWarps);
            }
            seen_blocks_ += 32;
        }
        if (run_.ordinal == 0) return true;
        index_of = static_cast<std::uint64_t>(part());
        wanted = static_cast<std::uint64_t>(run_.ordinal * layout::kGradientWarps);
        seen = ptx::load_acquire_gpu(p.counters + p.parts + index_of);
        return !ptx::any(seen < wanted);
    }

  private:
    // A k-block of 64 rows of bf16 or of 128 of e4m3.
    static constexpr int kBlockRows = C::kFp8Wgrad ? layout::kTransposedEdge : layout::kRowBlock;

    __device__ __forceinline__ int index() const { return ticket_ - run_.first_ticket; }
    __device__ __forceinline__ int part() const { return place_.expert * p.gradients.tiles() + index(); }

    const layout::BackwardParams& p;
    UnitRows rows_;
    layout::GradientWalk walk_;
    layout::GradientRun run_{};
    UnitPlace place_{};
    int ticket_ = 0;
    int seen_blocks_ = 0;
    bool counts_chunks_;  // a third chunk waits for the first
    bool bad_;
};

// One warp of each CTA: the tiles of the cluster, one after another, each once its inputs are there. The
// first CTA chooses and signals the second, with a ticket whose highest bit says which kind it is of.
template <class C>
class BackwardScheduler {
  public:
    __device__ __forceinline__ BackwardScheduler(const layout::BackwardParams& params,
                                                 const typename C::Smem& map, std::uint64_t launch, int cta)
        : p(params),
          e(params.route.endpoint),
          shared(map),
          epoch_(launch),
          cta_(cta),
          clusters_(static_cast<int>(ptx::num_ctas()) / C::kClusterSize),
          mail_(map),
          rows_(params, table_word(params.route.summary, layout::kSummaryChunks), clusters_),
          transposes_(params, table_word(params.route.summary, layout::kSummaryChunks)),
          gradients_(params, table_word(params.route.summary, layout::kSummaryChunks),
                     ptx::load_relaxed_sys(params.route.endpoint.sync + layout::kBadIdEpochWord) == launch) {}

    __device__ __forceinline__ void run() {
        RingCursor<C::kRing> ring;
        for (;; ring.next()) {
            ptx::mbarrier_wait(shared.ring_empty(ring.at), ring.parity ^ 1);
            const std::uint32_t ticket = cta_ == 0 ? choose() : follow();
            BackwardTile t{};
            if (ticket != kNoTicket) t = record(ticket);
            // What any lane has seen of the inputs holds for the CTA.
            __syncwarp();
            if (ptx::lane_id() == 0) {
                *reinterpret_cast<BackwardTile*>(shared.record(ring.at)) = t;
                ptx::mbarrier_arrive(shared.ring_full(ring.at));
            }
            __syncwarp();
            if (ticket == kNoTicket) return;
        }
    }

  private:
    static constexpr std::uint32_t kGradientBit = 0x80000000u;
    static constexpr std::uint32_t kTransposeBit = 0x40000000u;
    static constexpr std::uint32_t kNoTicket = 0xFFFFFFFFu;

    __device__ __forceinline__ BackwardTile record(std::uint32_t ticket) const {
        if constexpr (C::kFp8Wgrad)
            if ((ticket & (kGradientBit | kTransposeBit)) == kTransposeBit) return transposes_.record(cta_);
        return (ticket & kGradientBit) != 0 ? gradients_.record(cta_) : rows_.record(cta_);
    }

    __device__ __forceinline__ int draw(layout::CounterTicket which) {
        std::uint32_t ticket = 0;
        if (ptx::lane_id() == 0)
            ticket = ptx::fetch_add_relaxed_gpu(p.counters + which * layout::kCounterLine, 1);
        return static_cast<int>(ptx::from_lane(ticket, 0));
    }

    __device__ __forceinline__ std::uint32_t choose() {
        const std::uint32_t ticket = choose_ticket();
        mail_.send(ticket);
        return ticket;
    }
    __device__ __forceinline__ std::uint32_t choose_ticket() {
        std::int64_t idle_since = 0;
        for (int polls = 0;; ++polls) {
            std::uint64_t index, seen, wanted;
            if (row_ticket_ == kDraw) {
                // A cluster's first tile needs no draw, which would take a microsecond.
                row_ticket_ = first_ ? static_cast<int>(ptx::cta_id()) / C::kClusterSize
                                     : draw(layout::kTileTicket) + clusters_;
                first_ = false;
                if (!rows_.find(row_ticket_)) row_ticket_ = kNone;
            }
            if (row_ticket_ >= 0 && (rows_.ready(index, seen, wanted) || lost_)) {
                const auto ticket = static_cast<std::uint32_t>(row_ticket_);
                row_ticket_ = kDraw;
                return ticket;
            }
            if constexpr (C::kFp8Wgrad) {
                if (transpose_ticket_ == kDraw) {
                    transpose_ticket_ = draw(layout::kTransposeTicket);
                    if (!transposes_.find(transpose_ticket_)) transpose_ticket_ = kNone;
                }
                if (transpose_ticket_ >= 0 && (transposes_.ready(index, seen, wanted) || lost_)) {
                    const auto ticket = static_cast<std::uint32_t>(transpose_ticket_) | kTransposeBit;
                    transpose_ticket_ = kDraw;
                    return ticket;
                }
            }
            if (gradient_ticket_ == kDraw) {
                gradient_ticket_ = draw(layout::kGradientTicket);
                if (!gradients_.find(gradient_ticket_)) gradient_ticket_ = kNone;
            }
            if (gradient_ticket_ >= 0 && (gradients_.ready(index, seen, wanted) || lost_)) {
                const auto ticket = static_cast<std::uint32_t>(gradient_ticket_) | kGradientBit;
                gradient_ticket_ = kDraw;
                return ticket;
            }
            if (row_ticket_ == kNone && transpose_ticket_ == kNone && gradient_ticket_ == kNone)
                return kNoTicket;
            if (polls % kPollsPerCheck == 0) check_time(idle_since, index, seen, wanted);
        }
    }
    __device__ __forceinline__ std::uint32_t follow() {
        const std::uint32_t ticket = mail_.receive();
        if (ticket == kNoTicket) return ticket;
        const bool gradient = (ticket & kGradientBit) != 0;
        const bool transpose = C::kFp8Wgrad && !gradient && (ticket & kTransposeBit) != 0;
        const auto number = static_cast<int>(ticket & ~kGradientBit & ~(transpose ? kTransposeBit : 0));
        if (gradient) {
            gradients_.find(number);
        } else if (transpose) {
            if constexpr (C::kFp8Wgrad) transposes_.find(number);
        } else {
            rows_.find(number);
        }
        // The first CTA has seen the inputs; now this one sees them too.
        std::int64_t idle_since = 0;
        for (int polls = 0;; ++polls) {
            std::uint64_t index, seen, wanted;
            bool ready;
            if (gradient)
                ready = gradients_.ready(index, seen, wanted);
            else if (transpose)
                ready = transposes_ready(index, seen, wanted);
            else
                ready = rows_.ready(index, seen, wanted);
            if (ready || lost_) return ticket;
            if (polls % kPollsPerCheck == 0) check_time(idle_since, index, seen, wanted);
        }
    }

    __device__ __forceinline__ bool transposes_ready(std::uint64_t& index, std::uint64_t& seen,
                                                     std::uint64_t& wanted) const {
        if constexpr (C::kFp8Wgrad)
            return transposes_.ready(index, seen, wanted);
        else
            return true;
    }

    // Nothing was ready: check the time limit and whether a rank has given up. After a fault everything
    // counts as ready, and the launch runs to its end without waiting.
    __device__ __forceinline__ void check_time(std::int64_t& idle_since, std::uint64_t index,
                                               std::uint64_t seen, std::uint64_t wanted) {
        const std::int64_t now = ptx::global_timer();
        if (idle_since == 0) idle_since = now;
        lost_ = ptx::any(now - idle_since > e.progress_ns || abort_word(e) != 0);
        if (!lost_) return;
        const std::uint32_t missing = ptx::ballot(seen < wanted);
        const int witness = missing == 0 ? 0 : __ffs(static_cast<int>(missing)) - 1;
        if (static_cast<int>(ptx::lane_id()) == witness)
            give_up(e, epoch_, {Role::kTileInput, Kind::kProgress, index, seen, wanted});
        __syncwarp();
    }

    static constexpr int kDraw = -1;  // no ticket is held
    static constexpr int kNone = -2;  // there are no more

    const layout::BackwardParams& p;
    const layout::Endpoint& e;
    const typename C::Smem& shared;
    std::uint64_t epoch_;
    int cta_;
    int clusters_;
    ClusterMailbox<C> mail_;
    RowTiles<C> rows_;
    std::conditional_t<C::kFp8Wgrad, TransposesOfRank<C>, NoTransposes> transposes_;
    GradientTilesOfRank<C> gradients_;
    int row_ticket_ = kDraw;
    int gradient_ticket_ = kDraw;
    int transpose_ticket_ = C::kFp8Wgrad ? kDraw : kNone;
    bool first_ = true;
    bool lost_ = false;
};

}  // namespace mega_moe::device
