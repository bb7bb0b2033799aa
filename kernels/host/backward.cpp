#include "mega_moe/layer.h"

#include "host/layer_launch.h"
#include "host/make_status.h"
#include "host/route_params.h"
#include "host/tensor_map.h"
#include "layout/backward_params.h"
#include "layout/gradients.h"
#include "layout/layer_shared.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

namespace mega_moe {
namespace {

// Rows to store by each warp: more than any tile has, and few enough that the sum over all warps is an int.
constexpr std::int32_t kAllRows = 1 << 18;

using Parts = layout::Layout<layout::kWorkspaceParts>;

// By rows of a tensor, or by blocks of its columns.
struct Map {
    const char* what;
    const void* data;
    std::int64_t rows;
    std::int64_t columns;
    std::uint32_t box;  // rows, or blocks of columns
    layout::TensorMap& map;
};

template <int Count>
Status encode(decltype(&map_rows) make, const Map (&maps)[Count]) noexcept {
    for (const Map& m : maps) {
        const Status status = make(m.what, m.data, m.rows, m.columns, m.box, m.map);
        if (!status.ok) return status;
    }
    return ok_status();
}

// Operands of the GEMMs whose rows are loaded, in bf16.
Status map_operands(const BackwardProblem& problem, const layout::WorkspaceShape& local,
                    const layout::KernelFacts& kernel, std::byte* workspace, const Parts& parts,
                    layout::BackwardParams& p) noexcept {
    const std::int64_t rows = local.pools() * local.pool_rows;
    const std::int64_t gate_up_rows = local.num_local * 2 * local.intermediate;
    const auto block_m = static_cast<std::uint32_t>(kernel.block_m);
    // Each CTA of a cluster loads half of the weights that both read.
    const auto half_n = static_cast<std::uint32_t>(kernel.block_n / 2);
    const void* x = workspace + parts[layout::kXPool];
    const void* dy = workspace + parts[layout::kDyPool];
    const void* dz = workspace + parts[layout::kDzPool];
    const Map by_rows[] = {
        {"x pool", x, rows, local.hidden, block_m, p.x_load},
        {"x pool", x, rows, local.hidden, block_m / 2, p.x_half_load},
        {"dy pool", dy, rows, local.hidden, block_m, p.dy_load},
        {"dy pool", dy, rows, local.hidden, block_m / 2, p.dy_half_load},
        {"dz pool", dz, rows, 2 * local.intermediate, block_m, p.dz_load},
        {"dz pool", dz, rows, 2 * local.intermediate, block_m / 2, p.dz_half_load},
        {"w_gate_up", problem.call.inputs.w_gate_up, gate_up_rows, local.hidden, half_n, p.gate_up_load},
        {"w_down", problem.call.inputs.w_down, local.num_local * local.hidden, local.intermediate,
         layout::kRowBlock, p.down_load},
    };
    const Status status = encode(map_rows, by_rows);
    if (!status.ok) return status;
    const Map by_blocks[] = {{"w_gate_up", problem.call.inputs.w_gate_up, gate_up_rows, local.hidden,
                              half_n / layout::kRowBlock, p.gate_up_blocks}};
    return encode(map_blocks, by_blocks);
}

// Those operands in e4m3, and what makes them.
Status map_quantized_operands(const BackwardProblem& problem, const layout::WorkspaceShape& local,
                              const layout::KernelFacts& kernel, std::byte* workspace, const Parts& parts,
                              layout::BackwardParams& p) noexcept {
    const std::int64_t rows = local.pools() * local.pool_rows;
    const std::int64_t hidden = local.hidden;
    const std::int64_t inner = local.intermediate;
    const auto block_m = static_cast<std::uint32_t>(kernel.block_m);
    // Each CTA of a cluster loads half of the weights that both read.
    const auto half_n = static_cast<std::uint32_t>(kernel.block_n / 2);
    std::byte* x = workspace + parts[layout::kXCodePool];
    std::byte* dy = workspace + parts[layout::kDyCodePool];
    std::byte* dz = workspace + parts[layout::kDzCodePool];
    const Map by_rows[] = {
        {"x_e4m3 pool", x, rows, hidden, block_m, p.x_load},
        {"x_e4m3 pool", x, rows, hidden, block_m / 2, p.x_half_load},
        {"dy_e4m3 pool", dy, rows, hidden, block_m, p.dy_load},
        {"dy_e4m3 pool", dy, rows, hidden, block_m / 2, p.dy_half_load},
        {"dz_e4m3 pool", dz, rows, 2 * inner, block_m, p.dz_load},
        {"dz_e4m3 pool", dz, rows, 2 * inner, block_m / 2, p.dz_half_load},
        {"w_gate_up", problem.call.inputs.w_gate_up, local.num_local * 2 * inner, hidden, half_n,
         p.gate_up_load},
        {"w_down_t", problem.fp8.w_down_t, local.num_local * inner, hidden, half_n / 2, p.down_load},
        {"w_gate_up_t", problem.fp8.w_gate_up_t, local.num_local * hidden, 2 * inner, half_n,
         p.gate_up_blocks},
    };
    p.codes[0] = {x, reinterpret_cast<float*>(workspace + parts[layout::kXScalePool])};
    p.codes[1] = {dy, reinterpret_cast<float*>(workspace + parts[layout::kDyScalePool])};
    p.rounding = layout::scale_rounding(problem.call.shape.mode.scale_format == ScaleFormat::kPowerOfTwo);
    if (local.num_ranks == 1) {
        std::byte* codes = workspace + parts[layout::kOwnCodes];
        auto* scales = reinterpret_cast<float*>(workspace + parts[layout::kOwnScales]);
        p.own[0] = {codes, scales};
        p.own[1] = {codes + local.max_tokens * hidden,
                    scales + local.max_tokens * (hidden / layout::kQuantGroup)};
    }
    p.gate_up_scales = problem.fp8.gate_up_sf;
    p.down_scales = problem.fp8.down_sf;
    p.x_scales = workspace + parts[layout::kXScalePool];
    p.dy_scales = workspace + parts[layout::kDyScalePool];
    p.dz_scales = workspace + parts[layout::kDzScalePool];
    p.dz_codes = dz;
    p.dz_pool = workspace + parts[layout::kDzPool];
    p.h_pool = workspace + parts[layout::kHPool];
    p.dx_pool = workspace + parts[layout::kOPool];
    return encode(map_e4m3_rows, by_rows);
}

// What is stored, and the operands of the weights' gradients: bf16 in every precision.
Status make_maps(const BackwardProblem& problem, const layout::WorkspaceShape& local, std::byte* workspace,
                 const Parts& parts, layout::BackwardParams& p) noexcept {
    const std::int64_t rows = local.pools() * local.pool_rows;
    const std::int64_t hidden = local.hidden;
    const std::int64_t intermediate = local.intermediate;
    const std::int64_t gate_up_rows = local.num_local * 2 * intermediate;
    const std::int64_t down_rows = local.num_local * hidden;
    const void* x = workspace + parts[layout::kXPool];
    const void* dy = workspace + parts[layout::kDyPool];
    const void* dz = workspace + parts[layout::kDzPool];
    const void* h = workspace + parts[layout::kHPool];
    const void* dx = workspace + parts[layout::kOPool];
    // Blocks of half a cluster's tile of wgrad, in either extent.
    constexpr std::uint32_t kBlocks = layout::kGradientColumns / 2 / layout::kRowBlock;
    static_assert(layout::kGradientRows == layout::kGradientColumns);
    const Map by_blocks[] = {
        {"x pool", x, rows, hidden, kBlocks, p.x_blocks},
        {"dy pool", dy, rows, hidden, kBlocks, p.dy_blocks},
    };
    Status status = encode(map_blocks, by_blocks);
    if (!status.ok) return status;
    // Where they are in e4m3 no copy by a map reads or writes them.
    if (!local.has_transposed()) {
        const Map stores[] = {
            {"dz pool", dz, rows, 2 * intermediate, layout::kWarpRows, p.dz_store},
            {"h pool", h, rows, intermediate, layout::kWarpRows, p.h_store},
            {"dx pool", dx, rows, hidden, layout::kWarpRows, p.dx_store},
        };
        status = encode(map_rows, stores);
        if (!status.ok) return status;
        const Map read[] = {
            {"dz pool", dz, rows, 2 * intermediate, kBlocks, p.dz_blocks},
            {"h pool", h, rows, intermediate, kBlocks, p.h_blocks},
        };
        status = encode(map_blocks, read);
        if (!status.ok) return status;
    }
    const Map gradients[] = {
        {"dw_gate_up", problem.dw_gate_up, gate_up_rows, hidden, layout::kWarpRows, p.dw_gate_up_store},
        {"dw_down", problem.dw_down, down_rows, intermediate, layout::kWarpRows, p.dw_down_store},
    };
    for (const Map& m : gradients) {
        // An fp32 gradient is stored without a map, and one that nobody wants not at all.
        if (m.data == nullptr || problem.dw_is_fp32) continue;
        status = map_rows(m.what, m.data, m.rows, m.columns, m.box, m.map);
        if (!status.ok) return status;
    }
    return ok_status();
}

void place_rows(const BackwardProblem& problem, const layout::WorkspaceShape& local, std::byte* workspace,
                const Parts& parts, layout::BackwardParams& p) noexcept {
    const BufferShape& shape = problem.call.shape;
    const auto symmetric = layout::make_symmetric(symmetric_shape(shape));
    p.moved[0] = {static_cast<const std::byte*>(problem.call.inputs.x), workspace + parts[layout::kXPool],
                  symmetric[layout::kStagedX]};
    p.moved[1] = {static_cast<const std::byte*>(problem.dy), workspace + parts[layout::kDyPool],
                  symmetric[layout::kStagedDy]};
    p.summed = workspace + parts[layout::kOPool];
    p.saved = {static_cast<std::byte*>(problem.saved.memory), static_cast<std::int32_t>(problem.saved.rows)};
    p.out = static_cast<std::byte*>(problem.dx);
    p.x_flags = symmetric[layout::kXFlags];
    p.sent_flags = symmetric[layout::kSentFlags];
    p.owner_sums = symmetric[layout::kOwnerSums];
    p.owner_dtopk = symmetric[layout::kOwnerDtopk];
    p.pool_rows = local.pool_rows;
    p.dtopk_parts = reinterpret_cast<float*>(workspace + parts[layout::kDtopkPool]);
    p.dtopk = static_cast<float*>(problem.dtopk);
}

void place_counters(const layout::WorkspaceShape& local, const layout::KernelFacts& kernel,
                    std::byte* workspace, const Parts& parts, layout::BackwardParams& p) noexcept {
    const std::int64_t blocks = layout::num_row_blocks(local.max_slots());
    p.counters = reinterpret_cast<std::uint32_t*>(workspace + parts[layout::kCounters]);
    p.num_counters = local.counters();
    p.sent = layout::counter_of_sent();
    p.arrived = layout::counter_of_arrived(local.chunks());
    p.dz_done = p.arrived + blocks;
    p.dx_done = p.dz_done + blocks;
    p.gradients_done = layout::counter_of_gradients_done(local.max_slots(), local.chunks());
    p.parts = layout::counter_of_parts(local.max_slots(), local.chunks());
    p.transposed = local.counter_of_transposed();
    p.summed_done = p.needs_dx ? p.dx_done : p.dz_done;
    p.summed_wanted = static_cast<std::uint32_t>(
        (p.needs_dx ? local.hidden / kernel.block_n : local.intermediate / (kernel.block_n / 2)) *
        layout::kStoringWarps);
}

void place_gradients(const BackwardProblem& problem, const layout::WorkspaceShape& local,
                     std::byte* workspace, const Parts& parts, layout::BackwardParams& p) noexcept {
    const auto hidden = static_cast<std::int32_t>(local.hidden);
    const auto intermediate = static_cast<std::int32_t>(local.intermediate);
    auto* partials = reinterpret_cast<float*>(workspace + parts[layout::kPartials]);
    p.gradients = {hidden, intermediate, problem.dw_gate_up != nullptr, problem.dw_down != nullptr};
    p.dw_gate_up = {static_cast<std::byte*>(problem.dw_gate_up), partials, 2 * intermediate, hidden};
    p.dw_down = {static_cast<std::byte*>(problem.dw_down), partials + 2 * local.hidden * local.intermediate,
                 hidden, intermediate};
    p.partial_stride = 3 * local.hidden * local.intermediate;
    if (local.has_transposed()) {
        p.x_transposed = workspace + parts[layout::kXTransposedPool];
        p.dy_transposed = workspace + parts[layout::kDyTransposedPool];
        p.gradient_scales = reinterpret_cast<float*>(workspace + parts[layout::kGradientScalePool]);
        p.transposes = {hidden, problem.dw_gate_up != nullptr, problem.dw_down != nullptr};
    }
    p.gradients_are_fp32 = problem.dw_is_fp32;
    p.accumulate = problem.accumulate;
}

}  // namespace

Status launch_backward(const BackwardProblem& problem) noexcept {
    const RankCall& call = problem.call;
    const Mode& mode = call.shape.mode;
    LayerLaunch launch{};
    if (mode.wgrad == Precision::kFp8 && problem.probes.trace != nullptr)
        return error_status("weights' gradients in fp8 have no kernel that traces");
    const bool quantized = mode.backward == Precision::kFp8;
    VariantKey key{Op::kBackward, mode.backward};
    key.wgrad = mode.wgrad;
    key.saved = problem.saved.rows > 0 ? Saved::kGateUp : Saved::kNothing;
    key.trace = problem.probes.trace != nullptr;
    Status status = prepare_layer(key, call, launch);
    if (!status.ok) return status;
    const layout::WorkspaceShape local = workspace_shape(call.shape);
    const Parts parts = layout::make_workspace(local);
    auto* workspace = static_cast<std::byte*>(call.workspace);
    layout::BackwardParams p{};
    status = make_maps(problem, local, workspace, parts, p);
    if (!status.ok) return status;
    status = quantized ? map_quantized_operands(problem, local, launch.kernel, workspace, parts, p)
                       : map_operands(problem, local, launch.kernel, workspace, parts, p);
    if (!status.ok) return status;
    p.route = make_route_params(call);
    p.route.call = layout::backward_call(problem.needs_dx, problem.needs_dtopk);
    p.needs_dx = problem.needs_dx;
    p.returns_rows = problem.needs_dx;
    p.needs_dtopk = problem.needs_dtopk;
    place_rows(problem, local, workspace, parts, p);
    place_counters(local, launch.kernel, workspace, parts, p);
    place_gradients(problem, local, workspace, parts, p);
    p.hidden = static_cast<std::int32_t>(local.hidden);
    p.intermediate = static_cast<std::int32_t>(local.intermediate);
    p.activation = problem.activation;
    p.spreads_rows = problem.dw_gate_up != nullptr || problem.dw_down != nullptr;
    // A warp that quantizes a row for each of its slots is slower than the GEMMs: all of them do it for
    // the first chunk.
    p.first_per_warp = quantized ? kAllRows : first_rows_per_warp(local, launch);
    p.delay_seed = problem.probes.delay_seed;
    p.trace = trace_buffer(problem.probes, launch.ctas);
    return launch_layer(launch, call, p.route, &p);
}

}  // namespace mega_moe
