#include "mega_moe/backward.h"

#include "binding/check.h"
#include "binding/operand.h"
#include "binding/ops.h"
#include "binding/route_arguments.h"
#include "binding/stream.h"

namespace mega_moe::binding {
namespace {

// Both operators' arguments. The quantized one reads copies of the weights, and saved gate and up never.
struct BackwardArguments {
    const Tensor& x;
    const Tensor& dy;
    const Tensor& topk_idx;
    const Tensor& topk_weights;
    const Tensor& w_gate_up;
    const Tensor* w_gate_up_t;
    const Tensor* gate_up_sf;
    const Tensor* w_down;
    const Tensor* w_down_t;
    const Tensor* down_sf;
    const Tensor* saved_gate_up;
    const Tensor& dx;
    const Tensor& dtopk;
    const Tensor& dw_gate_up;
    const Tensor& dw_down;
    const Tensor& summary;
    RankArguments rank;
    int64_t max_tokens;
    int64_t num_experts;
    int64_t pool_rows;
    bool canaries;
    bool quantized_forward;
    bool quantized_gradients;
    double clamp;
    bool power_of_two;
    bool accumulate;
    int64_t delay_seed;
    int64_t trace;
    int64_t trace_bytes;

    bool quantized() const { return w_gate_up_t != nullptr; }
};

RouteShape checked_backward_shape(const Checker& check, const BackwardArguments& a) {
    check.dims("x", a.x, 2);
    check.dims("topk_idx", a.topk_idx, 2);
    const Tensor& down = a.quantized() ? *a.w_down_t : *a.w_down;
    check.dims(a.quantized() ? "w_down_t" : "w_down", down, 3);
    const int64_t hidden = a.x.size(1);
    const int64_t intermediate = down.size(a.quantized() ? 1 : 2);
    check.range("intermediate", intermediate, 1, INT64_MAX);
    check.multiple("hidden", hidden, 256);
    check.multiple("intermediate", intermediate, 128);
    const RouteShape shape = checked_shape(check, a.max_tokens, a.topk_idx.size(1), a.num_experts, hidden,
                                           intermediate, static_cast<int64_t>(a.rank.buffers.size()),
                                           a.pool_rows, a.quantized_forward, true, a.canaries,
                                           a.quantized_gradients ? 3
                                           : a.quantized()       ? 2
                                                                 : 1);
    // A tile's scale factors are one run.
    if (a.quantized()) check.multiple("pool_rows", shape.pool_rows, 128);
    return shape;
}

void check_weights(const Checker& check, const BackwardArguments& a, const RouteShape& shape) {
    const int64_t num_local = shape.num_experts / shape.num_ranks;
    const int64_t hidden = shape.hidden;
    const int64_t inner = shape.intermediate;
    const ScalarType type = a.quantized() ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
    check_operand(check, "w_gate_up", a.w_gate_up, {type}, {num_local, 2 * inner, hidden});
    if (!a.quantized()) {
        check_operand(check, "w_down", *a.w_down, {type}, {num_local, hidden, inner});
        return;
    }
    check_operand(check, "w_gate_up_t", *a.w_gate_up_t, {type}, {num_local, hidden, 2 * inner});
    check_operand(check, "gate_up_sf", *a.gate_up_sf, {ScalarType::Float},
                  {num_local, 2 * inner / 128, hidden / 128});
    check_operand(check, "w_down_t", *a.w_down_t, {type}, {num_local, inner, hidden});
    check_operand(check, "down_sf", *a.down_sf, {ScalarType::Float}, {num_local, hidden / 128, inner / 128});
}

void check_results(const Checker& check, const BackwardArguments& a, const RouteShape& shape) {
    const int64_t num_local = shape.num_experts / shape.num_ranks;
    const int64_t num_tokens = a.topk_idx.size(0);
    constexpr ScalarType kBf16 = ScalarType::BFloat16;
    constexpr ScalarType kFp32 = ScalarType::Float;
    if (is_wanted(a.dx)) check_operand(check, "dx", a.dx, {kBf16}, {num_tokens, shape.hidden});
    if (is_wanted(a.dtopk)) check_operand(check, "dtopk", a.dtopk, {kFp32}, {num_tokens, shape.top_k});
    if (is_wanted(a.dw_gate_up))
        check_operand(check, "dw_gate_up", a.dw_gate_up, {kBf16, kFp32},
                      {num_local, 2 * shape.intermediate, shape.hidden});
    if (is_wanted(a.dw_down))
        check_operand(check, "dw_down", a.dw_down, {kBf16, kFp32},
                      {num_local, shape.hidden, shape.intermediate});
    if (is_wanted(a.dw_gate_up) && is_wanted(a.dw_down))
        check.dtype("dw_down", a.dw_down, {a.dw_gate_up.scalar_type()});
}

void backward(const Checker& check, const BackwardArguments& a) {
    const RouteShape shape = checked_backward_shape(check, a);
    const int64_t num_tokens = a.topk_idx.size(0);
    check_operand(check, "x", a.x, {ScalarType::BFloat16}, {num_tokens, shape.hidden});
    check_operand(check, "dy", a.dy, {ScalarType::BFloat16}, {num_tokens, shape.hidden});
    check_weights(check, a, shape);
    const int64_t saved_rows =
        a.quantized() ? 0 : checked_saved_rows(check, *a.saved_gate_up, shape.intermediate);
    check_results(check, a, shape);
    if (!(a.clamp > 0)) check.fail("clamp is " + std::to_string(a.clamp) + ", must be above 0");
    check.range("delay_seed", a.delay_seed, 0, UINT32_MAX);
    check.range("trace_bytes", a.trace_bytes, 0, INT64_MAX);
    check.aligned("trace", static_cast<std::uintptr_t>(a.trace), 8);
    BackwardProblem problem{};
    problem.route = checked_problem(check, shape, a.topk_idx, a.topk_weights, a.summary, a.rank, true);
    const auto input = [&](const char* name, const Tensor& tensor) {
        check.same_device(name, tensor, a.topk_idx);
        return tensor.const_data_ptr();
    };
    const auto result = [&](const char* name, const Tensor& tensor) -> void* {
        if (!is_wanted(tensor)) return nullptr;
        check.same_device(name, tensor, a.topk_idx);
        return tensor.mutable_data_ptr();
    };
    problem.x = input("x", a.x);
    problem.dy = input("dy", a.dy);
    problem.w_gate_up = input("w_gate_up", a.w_gate_up);
    if (a.quantized()) {
        problem.w_gate_up_transposed = input("w_gate_up_t", *a.w_gate_up_t);
        problem.w_down_transposed = input("w_down_t", *a.w_down_t);
        problem.gate_up_scales = static_cast<const float*>(input("gate_up_sf", *a.gate_up_sf));
        problem.down_scales = static_cast<const float*>(input("down_sf", *a.down_sf));
    } else {
        problem.w_down = input("w_down", *a.w_down);
    }
    if (saved_rows > 0) problem.saved_gate_up = input("saved_gate_up", *a.saved_gate_up);
    problem.saved_rows = saved_rows;
    problem.dx = result("dx", a.dx);
    problem.dtopk = result("dtopk", a.dtopk);
    problem.dw_gate_up = result("dw_gate_up", a.dw_gate_up);
    problem.dw_down = result("dw_down", a.dw_down);
    problem.trace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(a.trace));
    problem.trace_bytes = a.trace_bytes;
    problem.clamp = static_cast<float>(a.clamp);
    problem.power_of_two = a.power_of_two;
    problem.delay_seed = static_cast<std::uint32_t>(a.delay_seed);
    problem.needs_dx = is_wanted(a.dx);
    problem.needs_dtopk = is_wanted(a.dtopk);
    problem.gradients_are_fp32 =
        (is_wanted(a.dw_gate_up) ? a.dw_gate_up : a.dw_down).scalar_type() == ScalarType::Float;
    problem.accumulate = a.accumulate;
    const torch::stable::accelerator::DeviceGuard guard(a.topk_idx.get_device_index());
    problem.route.stream = current_stream(problem.route.device);
    const Status status = launch_backward(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace

void moe_backward(const Tensor& x, const Tensor& dy, const Tensor& topk_idx, const Tensor& topk_weights,
                  const Tensor& w_gate_up, const Tensor& w_down, const Tensor& saved_gate_up,
                  const Tensor& dx, const Tensor& dtopk, const Tensor& dw_gate_up, const Tensor& dw_down,
                  const Tensor& summary, std::vector<int64_t> buffers, int64_t workspace, int64_t record,
                  int64_t max_tokens, int64_t num_experts, int64_t pool_rows, bool canaries, int64_t rank,
                  int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, bool accumulate,
                  int64_t delay_seed, int64_t trace, int64_t trace_bytes) {
    backward(Checker("moe_backward"), {x,
                                       dy,
                                       topk_idx,
                                       topk_weights,
                                       w_gate_up,
                                       nullptr,
                                       nullptr,
                                       &w_down,
                                       nullptr,
                                       nullptr,
                                       &saved_gate_up,
                                       dx,
                                       dtopk,
                                       dw_gate_up,
                                       dw_down,
                                       summary,
                                       {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns},
                                       max_tokens,
                                       num_experts,
                                       pool_rows,
                                       canaries,
                                       false,
                                       false,
                                       clamp,
                                       false,
                                       accumulate,
                                       delay_seed,
                                       trace,
                                       trace_bytes});
}

void moe_backward_fp8(const Tensor& x, const Tensor& dy, const Tensor& topk_idx, const Tensor& topk_weights,
                      const Tensor& w_gate_up, const Tensor& w_gate_up_t, const Tensor& gate_up_sf,
                      const Tensor& w_down_t, const Tensor& down_sf, const Tensor& dx, const Tensor& dtopk,
                      const Tensor& dw_gate_up, const Tensor& dw_down, const Tensor& summary,
                      std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                      int64_t num_experts, int64_t pool_rows, bool canaries, bool quantize,
                      bool quantize_gradients, int64_t rank, int64_t num_sms, int64_t arrival_ns,
                      int64_t progress_ns, double clamp, bool power_of_two, bool accumulate,
                      int64_t delay_seed, int64_t trace, int64_t trace_bytes) {
    backward(Checker("moe_backward_fp8"),
             {x,
              dy,
              topk_idx,
              topk_weights,
              w_gate_up,
              &w_gate_up_t,
              &gate_up_sf,
              nullptr,
              &w_down_t,
              &down_sf,
              nullptr,
              dx,
              dtopk,
              dw_gate_up,
              dw_down,
              summary,
              {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns},
              max_tokens,
              num_experts,
              pool_rows,
              canaries,
              quantize,
              quantize_gradients,
              clamp,
              power_of_two,
              accumulate,
              delay_seed,
              trace,
              trace_bytes});
}

}  // namespace mega_moe::binding
