#pragma once
#include "device/combine/combine.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/forward.cuh"
#include "device/sm90/forward_load.cuh"
#include "device/sm90/forward_math.cuh"
#include "device/sm90/forward_math_fp8.cuh"

namespace mega_moe::device {

template <int Stages, bool Trace, bool Saves>
using ForwardConfig = sm90::LayerConfig<Stages, Trace, Saves, layout::kTileRing, 1, 136, 184>;

// A thread of its math warps holds 128 sums and 64 partial sums.
template <int Stages, bool Trace>
using QuantizedForwardConfig =
    sm90::LayerConfig<Stages, Trace, false, layout::kTileRing, 1, 88, 208, layout::LayerForm::kFp8Forward>;

// All threads: the whole layer. `raw` is the CTA's shared memory.
template <class C>
__device__ __forceinline__ void run_forward(const layout::ForwardParams& p, std::byte* raw) {
    const typename C::Smem shared(raw);
    if (ptx::thread_id() == 0) shared.init_barriers();
    Tracer<C::kTrace> routing(p.trace, TraceRole::kLoad, ptx::thread_id() == 0);
    routing.start();
    if (!prepare_tables<C>(p, shared)) {
        poison<C>(p.out, std::int64_t{p.route.num_tokens} * p.hidden * 2);
        return;
    }
    routing.end(TraceKind::kRoute, 0, 0, 0);
    const auto warp = static_cast<int>(ptx::thread_id()) / 32;
    const bool first_lane = ptx::thread_id() % 32 == 0;
    const auto cta = static_cast<int>(ptx::cluster_rank());
    const std::uint64_t epoch = *shared.epoch();
    copy_first_rows<C>(p, epoch);
    routing.end(TraceKind::kFirstRows, 0, 0, 0);
    if (warp < 4) {
        ptx::shrink_registers<C::kCommRegisters>();
        if (warp == 0) {
            if (first_lane) sm90::load_tiles<C>(p, shared, cta, routing);
        } else if (warp == 1) {
            schedule_tiles<C>(p, shared, epoch, cta);
        } else {
            Tracer<C::kTrace> tracer(p.trace, warp == 2 ? TraceRole::kPull : TraceRole::kPush, first_lane);
            if (warp == 2) pull_rows<C>(p, shared, epoch, tracer);
            if (warp == 3 && ptx::cta_id() == 0) announce_empty_chunks<C>(p, epoch);
            Combiner<C>(p, epoch).run(tracer);
            if (warp == 3 && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(p.trace, warp < 8 ? TraceRole::kMath0 : TraceRole::kMath1,
                                 ptx::thread_id() % 128 == 0);
        if constexpr (C::kQuantized)
            sm90::multiply_quantized_tiles<C>(p, shared, tracer);
        else
            sm90::multiply_tiles<C>(p, shared, tracer);
        Combiner<C>(p, epoch).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison<C>(p.out, std::int64_t{p.route.num_tokens} * p.hidden * 2);
}

}  // namespace mega_moe::device
