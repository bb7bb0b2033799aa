#pragma once
#include "device/ptx/register_budget.cuh"
#include "device/role/backward_load.cuh"
#include "device/role/backward_math.cuh"
#include "device/role/backward_rows.cuh"
#include "device/role/backward_schedule.cuh"
#include "device/role/layer_combine.cuh"
#include "device/role/layer_pull.cuh"
#include "device/role/layer_tables.cuh"
#include "device/role/quantized_backward_math.cuh"

namespace mega_moe::device {

// All threads: every result that was wanted becomes NaN, but for gradients that are added to what the caller
// has.
template <class C>
__device__ __forceinline__ void poison_results(const BackwardParams& p) {
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
__device__ __forceinline__ void run_backward(const BackwardParams& p, std::byte* raw) {
    const LayerShared<C> shared(raw);
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
            if (first_lane) BackwardLoader<C>(p, shared, cta).run(routing);
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
            Combiner<C, DtopkBeside>(p, epoch, {p}).run(tracer);
            if (warp == 3 && ptx::cta_id() == 0) await_all_ranks(p, epoch);
        }
    } else {
        ptx::grow_registers<C::kMathRegisters>();
        Tracer<C::kTrace> tracer(p.trace, warp < 8 ? TraceRole::kMath0 : TraceRole::kMath1,
                                 ptx::thread_id() % 128 == 0);
        if constexpr (C::kQuantized)
            QuantizedBackwardMath<C>(p, shared).run(tracer);
        else
            BackwardMath<C>(p, shared).run(tracer);
        Combiner<C, DtopkBeside>(p, epoch, {p}).run(tracer);
    }
    __syncwarp();
    // A CTA whose shared memory is gone can take no more arrivals and no more multicast of the other.
    ptx::cluster_sync();
    if (abort_word(p.route.endpoint) != 0) poison_results<C>(p);
}

}  // namespace mega_moe::device
