#include "mega_moe/backward.h"

#include "binding/check.h"
#include "binding/operand.h"
#include "binding/ops.h"
#include "binding/route_arguments.h"
#include "binding/stream.h"

namespace mega_moe::binding {

void moe_backward(const Tensor& x, const Tensor& dy, const Tensor& topk_idx, const Tensor& topk_weights,
                  const Tensor& w_gate_up, const Tensor& w_down, const Tensor& saved_gate_up,
                  const Tensor& dx, const Tensor& dtopk, const Tensor& dw_gate_up, const Tensor& dw_down,
                  const Tensor& summary, std::vector<int64_t> buffers, int64_t workspace, int64_t record,
                  int64_t max_tokens, int64_t num_experts, int64_t pool_rows, bool canaries, int64_t rank,
                  int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, bool accumulate,
                  int64_t delay_seed, int64_t trace, int64_t trace_bytes) {
    const Checker check("moe_backward");
    check.dims("x", x, 2);
    check.dims("topk_idx", topk_idx, 2);
    check.dims("w_down", w_down, 3);
    const int64_t hidden = x.size(1);
    const int64_t intermediate = w_down.size(2);
    check.range("intermediate", intermediate, 1, INT64_MAX);
    check.multiple("hidden", hidden, 256);
    check.multiple("intermediate", intermediate, 128);
    const auto num_ranks = static_cast<int64_t>(buffers.size());
    const RouteShape shape = checked_shape(check, max_tokens, topk_idx.size(1), num_experts, hidden,
                                           intermediate, num_ranks, pool_rows, false, true, canaries, 1);
    const int64_t num_tokens = topk_idx.size(0);
    const int64_t num_local = num_experts / num_ranks;
    constexpr ScalarType kBf16 = ScalarType::BFloat16;
    constexpr ScalarType kFp32 = ScalarType::Float;
    check_operand(check, "x", x, {kBf16}, {num_tokens, hidden});
    check_operand(check, "dy", dy, {kBf16}, {num_tokens, hidden});
    check_operand(check, "w_gate_up", w_gate_up, {kBf16}, {num_local, 2 * intermediate, hidden});
    check_operand(check, "w_down", w_down, {kBf16}, {num_local, hidden, intermediate});
    const int64_t saved_rows = checked_saved_rows(check, saved_gate_up, intermediate);
    if (is_wanted(dx)) check_operand(check, "dx", dx, {kBf16}, {num_tokens, hidden});
    if (is_wanted(dtopk)) check_operand(check, "dtopk", dtopk, {kFp32}, {num_tokens, shape.top_k});
    const bool both = is_wanted(dw_gate_up) && is_wanted(dw_down);
    if (is_wanted(dw_gate_up))
        check_operand(check, "dw_gate_up", dw_gate_up, {kBf16, kFp32}, {num_local, 2 * intermediate, hidden});
    if (is_wanted(dw_down))
        check_operand(check, "dw_down", dw_down, {kBf16, kFp32}, {num_local, hidden, intermediate});
    if (both) check.dtype("dw_down", dw_down, {dw_gate_up.scalar_type()});
    if (!(clamp > 0)) check.fail("clamp is " + std::to_string(clamp) + ", must be above 0");
    check.range("delay_seed", delay_seed, 0, UINT32_MAX);
    check.range("trace_bytes", trace_bytes, 0, INT64_MAX);
    check.aligned("trace", static_cast<std::uintptr_t>(trace), 8);
    BackwardProblem problem{};
    problem.route =
        checked_problem(check, shape, topk_idx, topk_weights, summary,
                        {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns}, true);
    const auto input = [&](const char* name, const Tensor& tensor) {
        check.same_device(name, tensor, topk_idx);
        return tensor.const_data_ptr();
    };
    const auto result = [&](const char* name, const Tensor& tensor) -> void* {
        if (!is_wanted(tensor)) return nullptr;
        check.same_device(name, tensor, topk_idx);
        return tensor.mutable_data_ptr();
    };
    problem.x = input("x", x);
    problem.dy = input("dy", dy);
    problem.w_gate_up = input("w_gate_up", w_gate_up);
    problem.w_down = input("w_down", w_down);
    if (saved_rows > 0) problem.saved_gate_up = input("saved_gate_up", saved_gate_up);
    problem.saved_rows = saved_rows;
    problem.dx = result("dx", dx);
    problem.dtopk = result("dtopk", dtopk);
    problem.dw_gate_up = result("dw_gate_up", dw_gate_up);
    problem.dw_down = result("dw_down", dw_down);
    problem.trace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(trace));
    problem.trace_bytes = trace_bytes;
    problem.clamp = static_cast<float>(clamp);
    problem.delay_seed = static_cast<std::uint32_t>(delay_seed);
    problem.needs_dx = is_wanted(dx);
    problem.needs_dtopk = is_wanted(dtopk);
    problem.gradients_are_fp32 =
        (is_wanted(dw_gate_up) ? dw_gate_up : dw_down).scalar_type() == ScalarType::Float;
    problem.accumulate = accumulate;
    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    problem.route.stream = current_stream(problem.route.device);
    const Status status = launch_backward(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
