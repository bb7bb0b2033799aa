#include "mega_moe/forward.h"

#include <algorithm>

#include "device/role/forward_params.h"
#include "host/launch.h"
#include "host/make_status.h"
#include "host/route_params.h"
#include "host/tensor_map.h"
#include "layout/layer_shared.h"
#include "layout/pools.h"
#include "layout/route_shared.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

namespace mega_moe {
namespace {

constexpr int kCtasPerCluster = 2;

Status make_maps(const ForwardProblem& problem, const layout::WorkspaceShape& local, std::byte* workspace,
                 const layout::Layout<layout::kWorkspaceParts>& parts, device::ForwardParams& p) noexcept {
    const std::int64_t rows = local.pools() * local.pool_rows;
    constexpr std::uint32_t kHeight = layout::kTileRows;
    const std::int64_t hidden = local.hidden;
    const std::int64_t intermediate = local.intermediate;
    const void* x_pool = workspace + parts[layout::kXPool];
    const void* h_pool = workspace + parts[layout::kHPool];
    const void* o_pool = workspace + parts[layout::kOPool];
    struct Map {
        const char* what;
        const void* data;
        std::int64_t rows;
        std::int64_t columns;
        std::uint32_t box_rows;
        device::TensorMap& map;
    };
    const Map maps[] = {
        {"x pool", x_pool, rows, hidden, kHeight, p.x_load},
        {"x pool", x_pool, rows, hidden, kHeight / 2, p.x_half_load},
        {"h pool", h_pool, rows, intermediate, kHeight, p.h_load},
        {"h pool", h_pool, rows, intermediate, kHeight / 2, p.h_half_load},
        {"w_gate_up", problem.w_gate_up, local.num_local * 2 * intermediate, hidden, 128, p.gate_up_load},
        {"w_down", problem.w_down, local.num_local * hidden, intermediate, 128, p.down_load},
        {"h pool", h_pool, rows, intermediate, 16, p.h_store},
        {"o pool", o_pool, rows, hidden, 16, p.o_store},
    };
    for (const Map& m : maps) {
        const Status status = map_rows(m.what, m.data, m.rows, m.columns, m.box_rows, m.map);
        if (!status.ok) return status;
    }
    return ok_status();
}

}  // namespace

Status launch_forward(const ForwardProblem& problem) noexcept {
    const RouteProblem& route = problem.route;
    DeviceFacts facts{};
    const Variant* variant = nullptr;
    const Op op = problem.trace == nullptr ? Op::kForward : Op::kForwardTrace;
    Status status = prepare_launch(op, Precision::kBf16, route.device, facts, variant);
    if (!status.ok) return status;
    if (route.num_sms > facts.num_sms) {
        return error_status("num_sms is %lld, must be at most the device's %d",
                            static_cast<long long>(route.num_sms), facts.num_sms);
    }
    const std::int64_t sms =
        std::min<std::int64_t>(route.num_sms == 0 ? facts.num_sms : route.num_sms, layout::kMaxCtas);
    const std::int64_t ctas = sms / kCtasPerCluster * kCtasPerCluster;
    if (ctas == 0) return error_status("num_sms is %lld, must be at least 2", static_cast<long long>(sms));

    const layout::WorkspaceShape local = workspace_shape(route.shape);
    const auto parts = layout::make_workspace(local);
    const auto symmetric = layout::make_symmetric(symmetric_shape(route.shape));
    const layout::Staging staging = layout::make_staging(route.shape.max_tokens, route.shape.top_k,
                                                         route.shape.hidden, route.shape.quantise);
    auto* workspace = static_cast<std::byte*>(route.workspace);
    const std::int64_t blocks = layout::num_row_blocks(local.max_slots());

    device::ForwardParams p{};
    status = make_maps(problem, local, workspace, parts, p);
    if (!status.ok) return status;
    p.route = make_route_params(route);
    p.moved[0] = {static_cast<const std::byte*>(problem.x), workspace + parts[layout::kXPool],
                  symmetric[layout::kStaging] + staging.x};
    p.summed = workspace + parts[layout::kOPool];
    p.out = static_cast<std::byte*>(problem.y);
    p.returns_rows = true;
    p.counters = reinterpret_cast<std::uint32_t*>(workspace + parts[layout::kCounters]);
    p.num_counters = layout::num_counters(local.max_slots(), local.chunks());
    p.sent = layout::counter_of_sent();
    p.arrived = layout::counter_of_arrived(local.chunks());
    p.gate_up_done = p.arrived + blocks;
    p.down_done = p.gate_up_done + blocks;
    p.summed_done = p.down_done;
    p.summed_wanted = static_cast<std::uint32_t>(local.hidden / layout::kTileColumns * 4);
    p.x_flags = symmetric[layout::kXFlags];
    p.sent_flags = symmetric[layout::kSentFlags];
    p.home = symmetric[layout::kHome];
    p.pool_rows = local.pool_rows;
    p.hidden = static_cast<std::int32_t>(local.hidden);
    p.intermediate = static_cast<std::int32_t>(local.intermediate);
    p.clamp = problem.clamp;
    p.delay_seed = problem.delay_seed;
    constexpr auto kRoles = static_cast<std::int64_t>(layout::TraceRole::kCount);
    p.trace = {static_cast<std::int64_t*>(problem.trace), problem.trace_bytes / (ctas * kRoles * 3 * 8)};

    const std::int64_t routing =
        layout::make_route_shared(variant->threads, p.route.endpoint.num_ranks, p.route.num_local,
                                  p.route.max_blocks, p.route.one_chunk)
            .total;
    const layout::LayerShared shared = layout::make_layer_shared(variant->stages);
    if (routing > shared.ring || shared.total > facts.max_shared_bytes) {
        return error_status(
            "%d experts per rank and %lld tokens need %lld bytes of shared memory to route, the kernel has "
            "%d "
            "of its %d; the device gives a block %d",
            p.route.num_local, static_cast<long long>(route.shape.max_tokens),
            static_cast<long long>(routing), shared.ring, shared.total, facts.max_shared_bytes);
    }
    return launch_clusters(*variant, static_cast<unsigned>(ctas), kCtasPerCluster, shared.total, &p,
                           route.stream);
}

}  // namespace mega_moe
