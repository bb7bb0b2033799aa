#include "host/layer_launch.h"

#include <algorithm>

#include "host/launch.h"
#include "host/make_status.h"
#include "layout/route_shared.h"
#include "layout/tiles.h"

namespace mega_moe {
Status prepare_layer(const VariantKey& key, const RankCall& call, LayerLaunch& launch) noexcept {
    const Status status = prepare_launch(key, call.device, launch.facts, launch.variant);
    if (!status.ok) return status;
    launch.kernel = launch.variant->facts();
    const int cluster = launch.kernel.cluster_size;
    const int on_device = launch.facts.num_sms;
    if (call.num_sms > on_device) {
        return error_status("num_sms is %lld, must be at most the device's %d",
                            static_cast<long long>(call.num_sms), on_device);
    }
    const std::int64_t sms =
        std::min<std::int64_t>(call.num_sms == 0 ? on_device : call.num_sms, layout::kMaxCtas);
    launch.ctas = static_cast<unsigned>(sms / cluster * cluster);
    if (launch.ctas == 0)
        return error_status("num_sms is %lld, must be at least %d", static_cast<long long>(sms), cluster);
    return ok_status();
}

std::int32_t first_rows_per_warp(const layout::WorkspaceShape& local, const LayerLaunch& launch) noexcept {
    const std::int64_t experts = local.num_local * local.num_ranks;
    const std::int64_t rows =
        std::max<std::int64_t>(1, local.max_tokens * local.num_ranks * local.top_k / experts);
    const int columns = static_cast<int>(local.intermediate / (launch.kernel.block_n / 2));
    const int tiles =
        std::max(1, layout::num_tiles(static_cast<int>(std::min<std::int64_t>(rows, 1 << 24)), columns));
    const std::int64_t clusters = launch.ctas / static_cast<unsigned>(launch.kernel.cluster_size);
    const std::int64_t wanted = (clusters + tiles - 1) / tiles * rows;
    const std::int64_t warps = std::int64_t{launch.ctas} * (launch.kernel.threads / 32);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>((wanted + warps - 1) / warps, 2, 8));
}

layout::TraceBuffer trace_buffer(const Probes& probes, unsigned ctas) noexcept {
    constexpr auto kRoles = static_cast<std::int64_t>(layout::TraceRole::kCount);
    return {static_cast<std::int64_t*>(probes.trace),
            probes.trace_bytes / (std::int64_t{ctas} * kRoles * 3 * 8)};
}

Status launch_layer(const LayerLaunch& launch, const RankCall& call, const layout::RouteParams& params,
                    void* parameter) noexcept {
    const layout::KernelFacts& kernel = launch.kernel;
    const std::int64_t routing =
        layout::make_route_shared(kernel.threads, params.endpoint.num_ranks, params.num_local,
                                  params.max_blocks, params.one_chunk)
            .total;
    if (routing > kernel.route_bytes || kernel.shared_bytes > launch.facts.max_shared_bytes) {
        return error_status(
            "%d experts per rank and %lld tokens need %lld bytes of shared memory to route, the kernel has "
            "%d of its %d; the device gives a block %d",
            params.num_local, static_cast<long long>(call.shape.max_tokens), static_cast<long long>(routing),
            kernel.route_bytes, kernel.shared_bytes, launch.facts.max_shared_bytes);
    }
    return launch_cooperative(*launch.variant, kernel, launch.ctas, kernel.shared_bytes, parameter,
                              call.stream);
}

}  // namespace mega_moe
