#pragma once
#include "device/kernel/forward.cuh"

namespace mega_moe::device {

// The whole layer in one launch: routing, dispatch, gate/up projection, SwiGLU, down projection, combine. Its
// CTAs wait for one another and for those of other ranks, so all must be resident: launched cooperatively,
// one to an SM, in clusters of two.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_bf16_moe_forward(
    const __grid_constant__ layout::ForwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    run_forward<C>(p, raw);
}

}  // namespace mega_moe::device
