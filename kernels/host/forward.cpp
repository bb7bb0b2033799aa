#include "mega_moe/layer.h"

#include "host/layer_launch.h"
#include "host/make_status.h"
#include "host/route_params.h"
#include "host/tensor_map.h"
#include "layout/forward_params.h"
#include "layout/layer_shared.h"
#include "layout/pools.h"
#include "layout/scale_rounding.h"
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
        {"w_gate_up", problem.call.inputs.w_gate_up, local.num_local * 2 * intermediate, hidden, half_n,
         p.gate_up_load},
        {"w_down", problem.call.inputs.w_down, local.num_local * hidden, intermediate, half_n, p.down_load},
        {"h pool", h_pool, rows, intermediate, layout::kWarpRows, p.h_store},
    };
    const auto map_operand = local.fp8_forward() ? map_e4m3_rows : map_rows;
    for (const Map& m : maps) {
        const Status status = map_operand(m.what, m.data, m.rows, m.columns, m.box_rows, m.map);
        if (!status.ok) return status;
    }
    const Status status =
        map_rows("o pool", workspace + parts[layout::kOPool], rows, hidden, layout::kWarpRows, p.o_store);
    if (!status.ok || !local.fp8_forward()) return status;
    return map_scales("x_sf pool", workspace + parts[layout::kXScalePool], rows, hidden / layout::kQuantGroup,
                      block_m, layout::kScaleBlocks, p.x_scale_load);
}

void place_scales(const ForwardProblem& problem, std::byte* workspace, const Parts& parts,
                  std::int64_t staged, layout::ForwardParams& p) noexcept {
    p.moved_scales = {nullptr, workspace + parts[layout::kXScalePool], staged};
    p.rounding = layout::scale_rounding(problem.call.shape.mode.scale_format == ScaleFormat::kPowerOfTwo);
    p.gate_up_scales = problem.fp8.gate_up_sf;
    p.down_scales = problem.fp8.down_sf;
    p.o_pool = workspace + parts[layout::kOPool];
    p.h_scales = workspace + parts[layout::kHScalePool];
}

}  // namespace

Status launch_forward(const ForwardProblem& problem) noexcept {
    const RankCall& call = problem.call;
    const BufferShape& shape = call.shape;
    LayerLaunch launch{};
    VariantKey key{Op::kForward, shape.mode.forward};
    key.saved = problem.saved.rows > 0 ? Saved::kGateUp : Saved::kNothing;
    key.trace = problem.probes.trace != nullptr;
    Status status = prepare_layer(key, call, launch);
    if (!status.ok) return status;

    const layout::WorkspaceShape local = workspace_shape(shape);
    const Parts parts = layout::make_workspace(local);
    const auto symmetric = layout::make_symmetric(symmetric_shape(shape));
    auto* workspace = static_cast<std::byte*>(call.workspace);
    const std::int64_t blocks = layout::num_row_blocks(local.max_slots());

    layout::ForwardParams p{};
    status = make_maps(problem, local, launch.kernel, workspace, parts, p);
    if (!status.ok) return status;
    p.route = make_route_params(call);
    p.route.call = local.fp8_forward() ? layout::kQuantizedForwardCall : layout::kForwardCall;
    const std::int64_t staged = symmetric[layout::kStagedX];
    if (problem.x_is_staged && call.num_tokens > 0) {
        const std::int64_t want = call.buffers[call.rank] + staged;
        if (reinterpret_cast<std::intptr_t>(call.inputs.x) != want)
            return error_status("x: address of e4m3 rows is %p, must be %p, where the buffer stages them",
                                call.inputs.x, reinterpret_cast<const void*>(want));
    }
    p.moved[0] = {problem.x_is_staged ? nullptr : static_cast<const std::byte*>(call.inputs.x),
                  workspace + parts[layout::kXPool], staged};
    if (local.fp8_forward()) place_scales(problem, workspace, parts, symmetric[layout::kStagedScales], p);
    p.summed = workspace + parts[layout::kOPool];
    p.saved = {static_cast<std::byte*>(problem.saved.memory), static_cast<std::int32_t>(problem.saved.rows)};
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
    p.owner_sums = symmetric[layout::kOwnerSums];
    p.pool_rows = local.pool_rows;
    p.hidden = static_cast<std::int32_t>(local.hidden);
    p.intermediate = static_cast<std::int32_t>(local.intermediate);
    p.activation = problem.activation;
    p.first_per_warp = first_rows_per_warp(local, launch);
    p.delay_seed = problem.probes.delay_seed;
    p.trace = trace_buffer(problem.probes, launch.ctas);
    return launch_layer(launch, call, p.route, &p);
}

}  // namespace mega_moe
