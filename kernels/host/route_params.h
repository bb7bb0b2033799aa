#pragma once
#include "layout/route_params.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"
#include "mega_moe/layer.h"

namespace mega_moe {

// What the layouts depend on.
layout::SymmetricShape symmetric_shape(const BufferShape& shape) noexcept;
layout::WorkspaceShape workspace_shape(const BufferShape& shape) noexcept;

// The kernel's parameters: every offset of the layouts turned into a pointer, here and nowhere else.
layout::RouteParams make_route_params(const RankCall& call) noexcept;

}  // namespace mega_moe
