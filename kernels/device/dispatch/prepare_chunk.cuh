#pragma once
#include <cstdint>

#include "device/comm/wait.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/route/tables.cuh"
#include "layout/backward_params.h"
#include "layout/gradients.h"
#include "layout/scale_runs.h"

// Preparation of the pools before a chunk of the backward arrives.
namespace mega_moe::device {

// One of `num_warps` warps: zeros in the rows of x and dy between an expert's last and the end of its row
// block, which sums over rows read: a NaN there would outlive the zeros of dz. Where those sums read e4m3, it
// is the codes of x and dy that are zeroed, so that what dz and h are made of is zero there.
template <class C>
__device__ __forceinline__ void zero_padding(const layout::BackwardParams& p, int chunk, int warp,
                                             int num_warps) {
    constexpr std::uint32_t kArrivals = C::kQuantizesOnArrival ? 1 + layout::kBf16RowThere : 1;
    const layout::RouteParams& r = p.route;
    const int row_of_slot = view_chunk(p, chunk).row_of_slot;
    const std::int64_t row_bytes = std::int64_t{p.hidden} * (C::kFp8Wgrad ? 1 : 2);
    std::byte* const x = C::kFp8Wgrad ? p.codes[0].codes : p.moved[0].pool;
    std::byte* const dy = C::kFp8Wgrad ? p.codes[1].codes : p.moved[1].pool;
    for (int i = warp; i < r.num_local * layout::kRowBlock; i += num_warps) {
        const std::int64_t unit = std::int64_t{chunk} * r.num_local + i / layout::kRowBlock;
        const int rows = table_word(r.expert_rows, unit);
        const int row = rows + i % layout::kRowBlock;
        if (row >= layout::ceil_div(rows, layout::kRowBlock) * layout::kRowBlock) continue;
        const int slot = table_word(r.expert_slots, unit) + row;
        const std::int64_t at = (std::int64_t{slot} + row_of_slot) * row_bytes;
        for (std::int64_t byte = std::int64_t{ptx::lane_id()} * 16; byte < row_bytes; byte += 512) {
            ptx::store(x + at + byte, {0, 0, 0, 0});
            ptx::store(dy + at + byte, {0, 0, 0, 0});
        }
        if constexpr (C::kFp8Wgrad) {
            const int groups = p.hidden / layout::kQuantGroup;
            for (int group = static_cast<int>(ptx::lane_id()); group < groups; group += 32) {
                const std::int64_t to = layout::scale_at(std::int64_t{slot} + row_of_slot, group, groups);
                ptx::store(p.codes[0].scales + to, 1.0f);
                ptx::store(p.codes[1].scales + to, 1.0f);
            }
        }
        ptx::fence_proxy_async_global();
        __syncwarp();
        if (ptx::lane_id() == 0)
            ptx::add_release_gpu(p.counters + p.arrived + slot / layout::kRowBlock, kArrivals);
    }
}

// One warp of each CTA, before it pulls the rows of a chunk: until the gradients have read what lies where
// they go.
template <class C>
struct ChunkPreparation {
    const layout::BackwardParams& p;
    std::uint64_t epoch;

    __device__ __forceinline__ void operator()(int chunk, bool& lost) const {
        // For the first chunk all warps have done it.
        if (chunk == 0) return;
        if (chunk >= 2) await_gradients(chunk - 2, lost);
        zero_padding<C>(p, chunk, static_cast<int>(ptx::cta_id()), static_cast<int>(ptx::num_ctas()));
    }

  private:
    __device__ __forceinline__ void await_gradients(int chunk, bool& lost) const {
        const layout::RouteParams& r = p.route;
        const layout::Endpoint& e = r.endpoint;
        std::uint32_t parts = 0;
        for (int expert = static_cast<int>(ptx::lane_id()); expert < r.num_local; expert += 32)
            parts += static_cast<std::uint32_t>(
                layout::num_parts(table_word(r.expert_rows, std::int64_t{chunk} * r.num_local + expert)));
        const std::uint64_t wanted = std::uint64_t{ptx::sum(parts)} *
                                     static_cast<std::uint64_t>(p.gradients.tiles() * layout::kGradientWarps);
        if (ptx::lane_id() == 0 && !lost) {
            const std::uint32_t* done = p.counters + p.gradients_done + chunk;
            std::uint64_t seen;
            const auto load = [&] { return static_cast<std::uint64_t>(ptx::load_acquire_gpu(done)); };
            if (!wait_for(e, load, wanted, e.progress_ns, seen)) {
                give_up(
                    e, epoch,
                    {Role::kChunkFree, Kind::kProgress, static_cast<std::uint64_t>(chunk + 2), seen, wanted});
                lost = true;
            }
        }
        lost = ptx::any(lost);
    }
};

}  // namespace mega_moe::device
