#pragma once
#include "device/role/route_params.h"
#include "mega_moe/route.h"

namespace mega_moe {

// The kernel's parameters: every offset of the layouts turned into a pointer, here and nowhere else.
device::RouteParams make_route_params(const RouteProblem& problem) noexcept;

}  // namespace mega_moe
