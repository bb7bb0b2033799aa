#pragma once
#include "device/route/route.cuh"
#include "layout/route_params.h"

namespace mega_moe::device {

// The routing phase alone. Its CTAs wait for one another and for those of other ranks, so all must be
// resident: launched cooperatively, one to an SM.
template <int Threads>
__global__ void __launch_bounds__(Threads, 1) sm90_route(const __grid_constant__ layout::RouteParams p) {
    extern __shared__ __align__(16) std::byte shared[];
    route<Threads>(p, shared);
}

}  // namespace mega_moe::device
