#include "mega_moe/forward.h"

#include "host/layer_launch.h"
#include "host/make_status.h"
#include "host/route_params.h"
#include "host/tensor_map.h"
#include "layout/forward_params.h"
#include "layout/layer_shared.h"
#include "layout/pools.h"
#include "layout/staging.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

namespace mega_moe {
namespace {

using Parts = layout::Layout<layout::kWorkspaceParts>;

Status make_maps(const ForwardProblem& problem, const layout::WorkspaceShape& local,
                 const layout::KernelFacts& kernel, std::byte* workspace, const Parts& parts,
                 layout::ForwardParams& p) noexcept {
    const std::int64_t rows = local.pools() * local.pool_rows;
    const auto block_m = static_cast<std::uint32_t>(kernel.block_m);
    // Each CTA of a cluster loads half of the weights that both read.
    const auto half_n = static_cast<std::uint32_t>(kernel.block_n / 2);
    const std::int64_t hidden = local.hidden;
    const std::int64_t intermediate = local.intermediate;
    const void* x_pool = workspace + parts[layout::kXPool];
    const void* h_pool = workspace + parts[layout::kHPool];
    struct Map {
        const char* what;
        const void* data;
        std::int64_t rows;
        std::int64_t columns;
        std::uint32_t box_rows;
        layout::TensorMap& map;
    };
    const Map maps[] = {
        {"x pool", x_pool, rows, hidden, block_m, p.x_load},
        {"x pool", x_pool, rows, hidden, block_m / 2, p.x_half_load},
        {"h pool", h_pool, rows, intermediate, block_m, p.h_load},
        {"h pool", h_pool, rows, intermediate, block_m / 2, p.h_half_load},
        {"w_gate_up", problem.w_gate_up, local.num_local * 2 * intermediate, hidden, half_n, p.gate_up_load},
        {"w_down", problem.w_down, local.num_local * hidden, intermediate, half_n, p.down_load},
        {"h pool", h_pool, rows, intermediate, layout::kWarpRows, p.h_store},
    };
    const auto map_operand = local.quantize ? map_e4m3_rows : map_rows;
    for (const Map& m : maps) {
        const Status status = map_operand(m.what, m.data, m.rows, m.columns, m.box_rows, m.map);
        if (!status.ok) return status;
    }
    const Status status =
        map_rows("o pool", workspace + parts[layout::kOPool], rows, hidden, layout::kWarpRows, p.o_store);
    if (!status.ok || !local.quantize) return status;
    return map_scales("x_sf pool", workspace + parts[layout::kXScalePool], rows, hidden / layout::kQuantGroup,
                      block_m, layout::kScaleBlocks, p.x_scale_load);
}

void place_scales(const ForwardProblem& problem, std::byte* workspace, const Parts& parts,
                  std::int64_t staged, layout::ForwardParams& p) noexcept {
    p.moved_scales = {nullptr, workspace + parts[layout::kXScalePool], staged};
    p.rounding = layout::scale_rounding(problem.power_of_two);
    p.gate_up_scales = problem.gate_up_scales;
    p.down_scales = problem.down_scales;
    p.o_pool = workspace + parts[layout::kOPool];
    p.h_scales = workspace + parts[layout::kHScalePool];
}

}  // namespace

Status launch_forward(const ForwardProblem& problem) noexcept {
    const RouteProblem& route = problem.route;
    LayerLaunch launch{};
    VariantKey key{Op::kForward, route.shape.quantize ? Precision::kFp8 : Precision::kBf16};
    key.saved = problem.saved_rows > 0 ? Saved::kGateUp : Saved::kNothing;
    key.trace = problem.trace != nullptr;
    Status status = prepare_layer(key, route, launch);
    if (!status.ok) return status;

    const layout::WorkspaceShape local = workspace_shape(route.shape);
    const Parts parts = layout::make_workspace(local);
    const auto symmetric = layout::make_symmetric(symmetric_shape(route.shape));
    const layout::Staging staging = layout::make_staging(route.shape.max_tokens, route.shape.top_k,
                                                         route.shape.hidden, route.shape.quantize);
    auto* workspace = static_cast<std::byte*>(route.workspace);
    const std::int64_t blocks = layout::num_row_blocks(local.max_slots());

    layout::ForwardParams p{};
    status = make_maps(problem, local, launch.kernel, workspace, parts, p);
    if (!status.ok) return status;
    p.route = make_route_params(route);
    p.route.call = local.quantize ? layout::kQuantizedForwardCall : layout::kForwardCall;
    const std::int64_t staged = symmetric[layout::kStaging] + staging.x;
    if (problem.x_is_e4m3 && route.num_tokens > 0) {
        const std::int64_t want = route.buffers[route.rank] + staged;
        if (reinterpret_cast<std::intptr_t>(problem.x) != want)
            return error_status("x: address of e4m3 rows is %p, must be %p, where the buffer stages them",
                                problem.x, reinterpret_cast<const void*>(want));
    }
    p.moved[0] = {problem.x_is_e4m3 ? nullptr : static_cast<const std::byte*>(problem.x),
                  workspace + parts[layout::kXPool], staged};
    if (local.quantize)
        place_scales(problem, workspace, parts, symmetric[layout::kStaging] + staging.x_sf, p);
    p.summed = workspace + parts[layout::kOPool];
    p.saved = {static_cast<std::byte*>(problem.saved_gate_up), static_cast<std::int32_t>(problem.saved_rows)};
    p.out = static_cast<std::byte*>(problem.y);
    p.returns_rows = true;
    p.counters = reinterpret_cast<std::uint32_t*>(workspace + parts[layout::kCounters]);
    p.num_counters = layout::num_counters(local.max_slots(), local.chunks());
    p.sent = layout::counter_of_sent();
    p.arrived = layout::counter_of_arrived(local.chunks());
    p.gate_up_done = p.arrived + blocks;
    p.down_done = p.gate_up_done + blocks;
    p.summed_done = p.down_done;
    p.summed_wanted =
        static_cast<std::uint32_t>(local.hidden / launch.kernel.block_n * layout::kStoringWarps);
    p.x_flags = symmetric[layout::kXFlags];
    p.sent_flags = symmetric[layout::kSentFlags];
    p.owner_sums = symmetric[layout::kHome];
    p.pool_rows = local.pool_rows;
    p.hidden = static_cast<std::int32_t>(local.hidden);
    p.intermediate = static_cast<std::int32_t>(local.intermediate);
    p.activation = {ActivationKind::kSwiglu, problem.clamp, 0.0f};
    p.first_per_warp = first_rows_per_warp(local, launch);
    p.delay_seed = problem.delay_seed;
    p.trace = trace_buffer(problem.trace, problem.trace_bytes, launch.ctas);
    return launch_layer(launch, route, p.route, &p);
}

}  // namespace mega_moe
