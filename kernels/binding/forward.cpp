#include "mega_moe/forward.h"

#include "binding/check.h"
#include "binding/operand.h"
#include "binding/ops.h"
#include "binding/route_arguments.h"
#include "binding/stream.h"

namespace mega_moe::binding {

void moe_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                 const Tensor& w_down, const Tensor& y, const Tensor& saved_gate_up, const Tensor& summary,
                 std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                 int64_t num_experts, int64_t pool_rows, bool canaries, bool backward, int64_t rank,
                 int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, int64_t delay_seed,
                 int64_t trace, int64_t trace_bytes) {
    const Checker check("moe_forward");
    check.dims("x", x, 2);
    check.dims("topk_idx", topk_idx, 2);
    check.dims("w_down", w_down, 3);
    const int64_t hidden = x.size(1);
    const int64_t intermediate = w_down.size(2);
    check.range("intermediate", intermediate, 1, INT64_MAX);
    check.multiple("hidden", hidden, 256);
    check.multiple("intermediate", intermediate, 128);
    const auto num_ranks = static_cast<int64_t>(buffers.size());
    const RouteShape shape =
        checked_shape(check, max_tokens, topk_idx.size(1), num_experts, hidden, intermediate, num_ranks,
                      pool_rows, false, true, canaries, backward);
    const int64_t num_tokens = topk_idx.size(0);
    const int64_t num_local = num_experts / num_ranks;
    check_operand(check, "x", x, {ScalarType::BFloat16}, {num_tokens, hidden});
    check_operand(check, "w_gate_up", w_gate_up, {ScalarType::BFloat16},
                  {num_local, 2 * intermediate, hidden});
    check_operand(check, "w_down", w_down, {ScalarType::BFloat16}, {num_local, hidden, intermediate});
    check_operand(check, "y", y, {ScalarType::BFloat16}, {num_tokens, hidden});
    const int64_t saved_rows = checked_saved_rows(check, saved_gate_up, intermediate);
    if (!(clamp > 0)) check.fail("clamp is " + std::to_string(clamp) + ", must be above 0");
    check.range("delay_seed", delay_seed, 0, UINT32_MAX);
    check.range("trace_bytes", trace_bytes, 0, INT64_MAX);
    check.aligned("trace", static_cast<std::uintptr_t>(trace), 8);
    ForwardProblem problem{};
    problem.route =
        checked_problem(check, shape, topk_idx, topk_weights, summary,
                        {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns}, true);
    check.same_device("x", x, topk_idx);
    check.same_device("w_gate_up", w_gate_up, topk_idx);
    check.same_device("w_down", w_down, topk_idx);
    check.same_device("y", y, topk_idx);
    if (saved_rows > 0) check.same_device("saved_gate_up", saved_gate_up, topk_idx);
    problem.x = x.const_data_ptr();
    problem.w_gate_up = w_gate_up.const_data_ptr();
    problem.w_down = w_down.const_data_ptr();
    problem.y = y.mutable_data_ptr();
    if (saved_rows > 0) problem.saved_gate_up = saved_gate_up.mutable_data_ptr();
    problem.saved_rows = saved_rows;
    problem.trace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(trace));
    problem.trace_bytes = trace_bytes;
    problem.clamp = static_cast<float>(clamp);
    problem.delay_seed = static_cast<std::uint32_t>(delay_seed);
    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    problem.route.stream = current_stream(problem.route.device);
    const Status status = launch_forward(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
