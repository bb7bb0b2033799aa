#pragma once
#include "host/device_facts.h"
#include "host/variant.h"
#include "layout/route_params.h"
#include "layout/trace.h"
#include "layout/workspace.h"
#include "mega_moe/layer.h"
#include "mega_moe/status.h"

namespace mega_moe {

// What a launch of a layer's kernel, forward or backward, goes by.
struct LayerLaunch {
    const Variant* variant;
    layout::KernelFacts kernel;
    DeviceFacts facts;
    unsigned ctas;
};

// Selects the kernel and the number of its CTAs, in whole clusters.
Status prepare_layer(const VariantKey& key, const RankCall& call, LayerLaunch& launch) noexcept;

layout::TraceBuffer trace_buffer(const Probes& probes, unsigned ctas) noexcept;

// Tokens that each warp of a CTA copies before it takes its role: together those of the first experts, whose
// tiles make the first wave of the clusters, when experts are even. One warp of each CTA would bring them
// more slowly than the GEMMs consume them.
std::int32_t first_rows_per_warp(const layout::WorkspaceShape& local, const LayerLaunch& launch) noexcept;

// Launches it with one parameter, whose routing part is `params`, unless its shared memory cannot hold the
// routing.
Status launch_layer(const LayerLaunch& launch, const RankCall& call, const layout::RouteParams& params,
                    void* parameter) noexcept;

}  // namespace mega_moe
