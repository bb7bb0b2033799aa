#pragma once
#include <cstdint>

#include "device/common/two_nans.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/special_registers.cuh"
#include "layout/backward_params.h"
#include "layout/forward_params.h"

// What a launch that fails leaves behind. All threads of every CTA that knows of the fault: other CTAs may
// have left before it, and whoever still writes sums does this after them.
namespace mega_moe::device {

template <class C>
__device__ __forceinline__ void poison(std::byte* out, std::int64_t bytes) {
    for (std::int64_t i = ptx::thread_id(); i < bytes / 16; i += C::kThreads)
        ptx::store(out + i * 16, {kTwoNans, kTwoNans, kTwoNans, kTwoNans});
}

template <class C>
__device__ __forceinline__ void poison_results(const layout::ForwardParams& p) {
    poison<C>(p.out, std::int64_t{p.route.num_tokens} * p.hidden * 2);
}

// Every result that was wanted, but for gradients of weights that are added to what the caller has.
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

}  // namespace mega_moe::device
