#pragma once
#include "device/kernel/forward.cuh"

namespace mega_moe::device {

// The same layer as sm90_bf16_moe_forward, launched alike, with both products in e4m3: x is quantized before
// it travels, h as it is stored, each with a scale factor per 1x128; weights come with one per 128x128.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_forward(
    const __grid_constant__ layout::ForwardParams p) {
    static_assert(C::kQuantized);
    extern __shared__ __align__(1024) std::byte raw[];
    run_forward<C>(p, raw);
}

}  // namespace mega_moe::device
