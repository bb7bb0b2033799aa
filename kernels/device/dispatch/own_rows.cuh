#pragma once
#include <cstdint>

#include "device/common/delay.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/warp.cuh"
#include "device/route/tables.cuh"
#include "layout/scale_runs.h"

// Dispatch with EP=1, of tokens that the rank quantized before it routed them: their codes and scale factors,
// from the order of the tokens into that of the slots. In the order of the slots, so that the tiles which
// come first have their rows first; with a token brought to all of its slots at once, half of all tokens come
// before the rows of the first tenth of the experts are complete.
namespace mega_moe::device {

// Rows of one expert with neighboring slots.
struct RowRun {
    static constexpr int kMost = 8;
    int slot;
    int rows;
};

// Runs of a chunk, every `step`-th. One warp; each lane holds one of 32 experts.
class RunsInOrder {
  public:
    __device__ __forceinline__ RunsInOrder(const layout::RouteParams& route, int chunk, int first, int step)
        : r_(route), unit_(chunk * route.num_local), at_(first), step_(step) {}

    __device__ __forceinline__ bool next(RowRun& run) {
        while (at_ >= before_ + held_) {
            if (expert_ + 32 >= r_.num_local) return false;
            before_ += held_;
            expert_ += 32;
            hold();
        }
        const int at = at_ - before_;
        const int lane = __popc(ptx::ballot(upto_ <= at));
        const int rows = __shfl_sync(ptx::kAllLanes, rows_, lane);
        const int done =
            (at - __shfl_sync(ptx::kAllLanes, upto_, lane) + layout::ceil_div(rows, RowRun::kMost)) *
            RowRun::kMost;
        run = {__shfl_sync(ptx::kAllLanes, slot_, lane) + done, min(RowRun::kMost, rows - done)};
        at_ += step_;
        return true;
    }

  private:
    __device__ __forceinline__ void hold() {
        const int expert = expert_ + static_cast<int>(ptx::lane_id());
        const bool exists = expert < r_.num_local;
        rows_ = exists ? table_word(r_.expert_rows, unit_ + expert) : 0;
        slot_ = exists ? table_word(r_.expert_slots, unit_ + expert) : 0;
        upto_ = static_cast<int>(
            ptx::inclusive_sum(static_cast<std::uint32_t>(layout::ceil_div(rows_, RowRun::kMost))));
        held_ = __shfl_sync(ptx::kAllLanes, upto_, 31);
    }

    const layout::RouteParams& r_;
    int unit_;
    int at_;
    int step_;
    int expert_ = -32;  // of lane 0
    int before_ = 0;    // runs of the experts before
    int held_ = 0;      // and of those that are held
    int rows_ = 0;
    int slot_ = 0;
    int upto_ = 0;
};

__device__ __forceinline__ bool has_own_codes(const layout::LayerParams& p) {
    return p.own[0].codes != nullptr;
}

// One warp: a run's codes and scale factors to their slots. Few rows at once: the addresses of more do not
// fit into a communication warp's registers.
__device__ __forceinline__ void copy_run(const layout::LayerParams& p, const ChunkView& view,
                                         const RowRun& run) {
    constexpr int kAtOnce = 4;
    const auto lane = static_cast<int>(ptx::lane_id());
    maybe_delay(p.delay_seed, static_cast<std::uint32_t>(run.slot));
    int token = 0;
    if (lane < run.rows)
        token = static_cast<int>(ptx::load_relaxed_gpu(p.route.slots + run.slot + lane) & 0xFFFFF);
    const int groups = p.hidden / layout::kQuantGroup;
#pragma unroll 1
    for (int first = 0; first < run.rows; first += kAtOnce) {
        const std::int64_t row = std::int64_t{run.slot} + view.row_of_slot + first;
        const int rows = run.rows - first;
#pragma unroll 1
        for (int moved = 0; moved < 2; ++moved) {
#pragma unroll 1
            for (int base = 0; base < p.hidden; base += 512) {
                const int at = base + lane * 16;
                uint4 v[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const std::int64_t from = __shfl_sync(ptx::kAllLanes, token, first + i);
                    if (i < rows && at < p.hidden)
                        v[i] = ptx::load_relaxed_sys(
                            reinterpret_cast<const uint4*>(p.own[moved].codes + from * p.hidden + at));
                }
                std::byte* to = p.codes[moved].codes + row * p.hidden + at;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i, to += p.hidden)
                    if (i < rows && at < p.hidden) ptx::store(to, v[i]);
            }
#pragma unroll 1
            for (int base = 0; base < groups; base += 32) {
                const int group = base + lane;
                float scale[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const std::int64_t from = __shfl_sync(ptx::kAllLanes, token, first + i);
                    if (i < rows && group < groups)
                        scale[i] = ptx::load_relaxed_gpu(p.own[moved].scales + from * groups + group);
                }
                // Rows next to each other have adjacent scale factors in a run.
                float* to = p.codes[moved].scales + layout::scale_at(row, group, groups);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (i < rows && group < groups) ptx::store(to + i, scale[i]);
            }
        }
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (lane == 0)
        ptx::add_release_gpu(p.counters + p.arrived + run.slot / layout::kRowBlock,
                             static_cast<std::uint32_t>(run.rows));
    __syncwarp();
}

}  // namespace mega_moe::device
