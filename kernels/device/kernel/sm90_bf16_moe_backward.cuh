#pragma once
#include "device/kernel/backward.cuh"

namespace mega_moe::device {

// The backward of the whole layer in one launch: routing, dispatch of x and dy, gate and up anew, dz, dx and
// its combine, the gradients of the weights and of the routing weights. Launched as the forward is.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_bf16_moe_backward(
    const __grid_constant__ layout::BackwardParams p) {
    extern __shared__ __align__(1024) std::byte raw[];
    run_backward<C>(p, raw);
}

}  // namespace mega_moe::device
