#pragma once
#include <cstdint>

#include "device/combine/combine.cuh"
#include "device/common/two_nans.cuh"
#include "device/ptx/global_memory.cuh"
#include "layout/backward_params.h"

namespace mega_moe::device {

// Gradients of the routing weights, which travel with dx: each is summed over the blocks of columns, in their
// order, by its expert's rank, and has one place on the token's owner rank.
struct DtopkPiggyback {
    const layout::BackwardParams& p;

    __device__ __forceinline__ void push(const TokenRows& t, const ChunkView& view, bool bad) const {
        if (!p.needs_dtopk || static_cast<int>(ptx::lane_id()) >= t.rows) return;
        const layout::Endpoint& e = p.route.endpoint;
        const int parts = p.intermediate / layout::kDtopkColumns;
        const float* part = p.dtopk_parts + (std::int64_t{t.slot} + view.row_of_slot) * parts;
        const auto source = static_cast<std::uint32_t>(ptx::load_relaxed_gpu(p.route.slots + t.slot));
        float sum = 0.0f;
#pragma unroll 4
        for (int i = 0; i < parts; ++i)
            sum += ptx::load_relaxed_gpu(part + i);
        const std::int64_t at = std::int64_t{t.token} * p.route.top_k + (source >> 25 & 15);
        if (e.num_ranks == 1)
            ptx::store(p.dtopk + at, bad ? __uint_as_float(kTwoNans) : sum);
        else
            ptx::store(e.at<float>(t.rank, p.owner_dtopk) + at, sum);
    }
    // Zero for slots without an expert.
    __device__ __forceinline__ void sum(int token, std::uint64_t epoch, bool bad) const {
        const layout::RouteParams& r = p.route;
        const auto lane = static_cast<int>(ptx::lane_id());
        if (!p.needs_dtopk || lane >= r.top_k) return;
        const std::int64_t at = std::int64_t{token} * r.top_k + lane;
        const bool held = holds_expert(r, token, lane, epoch);
        float value = 0.0f;
        if (held) {
            if (r.endpoint.num_ranks == 1) return;
            value = ptx::load_relaxed_sys(r.endpoint.at<const float>(r.endpoint.rank, p.owner_dtopk) + at);
        }
        ptx::store(p.dtopk + at, bad ? __uint_as_float(kTwoNans) : value);
    }
};

}  // namespace mega_moe::device
