#pragma once
#include "device/combine/combine.cuh"
#include "device/combine/dtopk.cuh"
#include "device/dispatch/prepare_chunk.cuh"
#include "device/dispatch/pull.cuh"
#include "device/kernel/prologue.cuh"
#include "device/ptx/register_budget.cuh"
#include "device/schedule/backward.cuh"
#include "device/sm90/backward_load.cuh"
#include "device/sm90/backward_math.cuh"
#include "device/sm90/backward_math_fp8.cuh"

namespace mega_moe::device {

// The scheduler decides as late as it can, since a gradient's tile takes long: it is one tile ahead.
template <int Stages, bool Trace, bool Saves>
using BackwardConfig = sm90::LayerConfig<Stages, Trace, Saves, 1, 2, 136, 184>;

// A thread of its math warps holds 128 sums and 64 partial sums, and reads what else it needs of a tile from
// the record, which it therefore keeps while the scheduler writes the next.
template <int Stages, bool Trace>
using QuantizedBackwardConfig =
    sm90::LayerConfig<Stages, Trace, false, 2, 2, 88, 208, layout::LayerForm::kFp8Backward>;

// With the weights' gradients in e4m3 too.
template <int Stages, bool Trace>
using QuantizedGradientsConfig =
    sm90::LayerConfig<Stages, Trace, false, 2, 2, 88, 208, layout::LayerForm::kFp8Gradients>;

// All threads: every result that was wanted becomes NaN, but for gradients that are added to what the caller
// has.
template <class C>
__device__ __forceinline__ void poison_results(const layout::BackwardParams& p) {
    const std::int64_t tokens = p.route.num_tokens;
    if (p.needs_dx) poison<C>(p.out, tokens * p.hidden * 2);
    if (p.needs_dtopk)
        for (std::int64_t i = ptx::thread_id(); i < tokens * p.route.top_k; i += C::kThreads)
            p.dtopk[i] = __uint_as_float(kTwoNans);
    if (p.accumulate) return;
    const std::int64_t bytes =
        std::int64_t{p.route.num_local} * p.hidden * p.intermediate * (p.gradients_are_fp32 ? 4 : 2);
    if (p.gradients.gate_up) poison<C>(p.dw_gate_up.out, 2 * bytes);
    if (p.gradients.down) poison<C>(p.dw_down.out, bytes);
}

// All threads: the whole backward. `raw` is the CTA's shared memory.
template <class C>
__device__ __forceinline__ void run_backward(const layout::BackwardParams& p, std::byte* raw) {
    const typename C::Smem shared(raw);
    if (ptx::thread_id() == 0) shared.init_barriers();
    Tracer<C::kTrace> routing(p.trace, TraceRole::kLoad, ptx::thread_id() == 0);
    routing.start();
    if (!prepare_tables<C>(p, shared)) {
        poison_results<C>(p);
        return;
    }
    routing.end(TraceKind::kRoute, 0, 0, 0);
    const auto warp = static_cast<int>(ptx::thread_id()) / 32;
    const bool first_lane = ptx::thread_id() % 32 == 0;
    const auto cta = static_cast<int>(ptx::cluster_rank());
    const std::uint64_t epoch = *shared.epoch();
    copy_first_rows<C>(p, epoch);
    zero_padding<C>(p, 0, warp * static_cast<int>(ptx::num_ctas()) + static_cast<int>(ptx::cta_id()),
                    C::kThreads / 32 * static_cast<int>(ptx::num_ctas()));
    // One warp takes the rows further that all have brought.
    if constexpr (C::kQuantizesRows) __syncthreads();
    routing.end(TraceKind::kFirstRows, 0, 0, 0);
    if (warp < 4) {
        ptx::shrink_registers<C::kCommRegisters>();
        if (warp == 0) {
            if (first_lane) sm90::BackwardLoader<C>(p, shared, cta).run(routing);
        } else if (warp == 1) {
            BackwardScheduler<C>(p, shared, epoch, cta).run();
        } else {
            Tracer<C::kTrace> tracer(p.trace, warp == 2 ? TraceRole::kPull : TraceRole::kPush, first_lane);
            if (warp == 3 && ptx::cta_id() == 0) announce_empty_chunks<C>(p, epoch);
            if (warp == 2)
                pull_rows<C>(p, shared, epoch, tracer, ChunkPreparation<C>{p, epoch});
            else if (C::kQuantizesRows && has_own_codes(p)) {
                tracer.start();
                copy_runs<C>(p, 0, 1, tracer);
            }
            Combiner<C, DtopkPiggyback>(p, epoch, {p}).run(tracer);
            if (warp == 3 && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(p.trace, warp < 8 ? TraceRole::kMath0 : TraceRole::kMath1,
                                 ptx::thread_id() % 128 == 0);
        if constexpr (C::kQuantized)
            sm90::QuantizedBackwardMath<C>(p, shared).run(tracer);
        else
            sm90::BackwardMath<C>(p, shared).run(tracer);
        Combiner<C, DtopkPiggyback>(p, epoch, {p}).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

}  // namespace mega_moe::device
