#pragma once
#include "device/kernel/backward.cuh"

namespace mega_moe::device {

// As sm90_bf16_moe_backward, launched alike, with gate and up, the gradient of h and dx in e4m3: x and dy
// travel in bf16 and are quantized as they arrive, dz as it is stored, each with a scale factor per 1x128.
// The weights' gradients are made of bf16.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fp8_moe_backward(
    const __grid_constant__ layout::BackwardParams p) {
    static_assert(C::kQuantizesRows);
    extern __shared__ __align__(1024) std::byte raw[];
    run_backward<C>(p, raw);
}

}  // namespace mega_moe::device
