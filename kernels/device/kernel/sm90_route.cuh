#pragma once
#include "device/role/route.cuh"
#include "device/role/route_params.h"

namespace mega_moe::device {

// The routing phase alone. Its CTAs wait for one another and for those of other ranks, so all must be
// resident: launched cooperatively, one to an SM.
template <int Threads>
__global__ void __launch_bounds__(Threads, 1) sm90_route(const __grid_constant__ RouteParams p) {
    extern __shared__ __align__(16) std::byte shared[];
    route<Threads>(p, shared);
}

}  // namespace mega_moe::device
