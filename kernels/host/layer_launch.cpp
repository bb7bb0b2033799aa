#include "host/layer_launch.h"

#include <algorithm>

#include "host/launch.h"
#include "host/make_status.h"
#include "layout/layer_shared.h"
#include "layout/route_shared.h"
#include "layout/tiles.h"

namespace mega_moe {
namespace {

constexpr int kCtasPerCluster = 2;

layout::LayerForm layer_form(const Variant& variant) noexcept {
    if (variant.precision != Precision::kFp8) return layout::LayerForm::kBf16;
    const bool forward = variant.op == Op::kForward || variant.op == Op::kForwardTrace;
    if (forward) return layout::LayerForm::kFp8Forward;
    return variant.op == Op::kBackwardGradients ? layout::LayerForm::kFp8Gradients
                                                : layout::LayerForm::kFp8Backward;
}

}  // namespace

Status prepare_layer(Op op, Precision precision, const RouteProblem& route, LayerLaunch& launch) noexcept {
    const Status status = prepare_launch(op, precision, route.device, launch.facts, launch.variant);
    if (!status.ok) return status;
    const int on_device = launch.facts.num_sms;
    if (route.num_sms > on_device) {
        return error_status("num_sms is %lld, must be at most the device's %d",
                            static_cast<long long>(route.num_sms), on_device);
    }
    const std::int64_t sms =
        std::min<std::int64_t>(route.num_sms == 0 ? on_device : route.num_sms, layout::kMaxCtas);
    launch.ctas = static_cast<unsigned>(sms / kCtasPerCluster * kCtasPerCluster);
    if (launch.ctas == 0)
        return error_status("num_sms is %lld, must be at least 2", static_cast<long long>(sms));
    return ok_status();
}

std::int32_t first_rows_per_warp(const layout::WorkspaceShape& local, const LayerLaunch& launch) noexcept {
    const std::int64_t experts = local.num_local * local.num_ranks;
    const std::int64_t rows =
        std::max<std::int64_t>(1, local.max_tokens * local.num_ranks * local.top_k / experts);
    const int columns = static_cast<int>(local.intermediate / 128);
    const int tiles =
        std::max(1, layout::num_tiles(static_cast<int>(std::min<std::int64_t>(rows, 1 << 24)), columns));
    const std::int64_t clusters = launch.ctas / kCtasPerCluster;
    const std::int64_t wanted = (clusters + tiles - 1) / tiles * rows;
    const std::int64_t warps = std::int64_t{launch.ctas} * (launch.variant->threads / 32);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>((wanted + warps - 1) / warps, 2, 8));
}

layout::TraceBuffer trace_buffer(void* rows, std::int64_t bytes, unsigned ctas) noexcept {
    constexpr auto kRoles = static_cast<std::int64_t>(layout::TraceRole::kCount);
    return {static_cast<std::int64_t*>(rows), bytes / (std::int64_t{ctas} * kRoles * 3 * 8)};
}

Status launch_layer(const LayerLaunch& launch, const RouteProblem& route, const layout::RouteParams& params,
                    void* parameter) noexcept {
    const Variant& variant = *launch.variant;
    const std::int64_t routing =
        layout::make_route_shared(variant.threads, params.endpoint.num_ranks, params.num_local,
                                  params.max_blocks, params.one_chunk)
            .total;
    const layout::LayerShared shared = layout::make_layer_shared(variant.stages, layer_form(variant));
    if (routing > shared.ring || shared.total > launch.facts.max_shared_bytes) {
        return error_status(
            "%d experts per rank and %lld tokens need %lld bytes of shared memory to route, the kernel has "
            "%d "
            "of its %d; the device gives a block %d",
            params.num_local, static_cast<long long>(route.shape.max_tokens), static_cast<long long>(routing),
            shared.ring, shared.total, launch.facts.max_shared_bytes);
    }
    return launch_clusters(variant, launch.ctas, kCtasPerCluster, shared.total, parameter, route.stream);
}

}  // namespace mega_moe
