#include "mega_moe/forward.h"

#include "binding/check.h"
#include "binding/operand.h"
#include "binding/ops.h"
#include "binding/route_arguments.h"
#include "binding/stream.h"

namespace mega_moe::binding {
namespace {

// Both operators' arguments. Weights of the quantized one have scale factors, and it saves nothing.
struct ForwardArguments {
    const Tensor& x;
    const Tensor& topk_idx;
    const Tensor& topk_weights;
    const Tensor& w_gate_up;
    const Tensor* gate_up_scales;
    const Tensor& w_down;
    const Tensor* down_scales;
    const Tensor& y;
    const Tensor* saved_gate_up;
    const Tensor& summary;
    RankArguments rank;
    int64_t max_tokens;
    int64_t num_experts;
    int64_t pool_rows;
    bool canaries;
    int64_t backward;
    double clamp;
    bool power_of_two;
    int64_t delay_seed;
    int64_t trace;
    int64_t trace_bytes;

    bool quantized() const { return gate_up_scales != nullptr; }
};

RouteShape checked_forward_shape(const Checker& check, const ForwardArguments& a) {
    check.dims("x", a.x, 2);
    check.dims("topk_idx", a.topk_idx, 2);
    check.dims("w_down", a.w_down, 3);
    const int64_t hidden = a.x.size(1);
    const int64_t intermediate = a.w_down.size(2);
    check.range("intermediate", intermediate, 1, INT64_MAX);
    check.multiple("hidden", hidden, a.quantized() ? 512 : 256);
    check.multiple("intermediate", intermediate, 128);
    const RouteShape shape = checked_shape(check, a.max_tokens, a.topk_idx.size(1), a.num_experts, hidden,
                                           intermediate, static_cast<int64_t>(a.rank.buffers.size()),
                                           a.pool_rows, a.quantized(), true, a.canaries, a.backward);
    // A tile's scale factors of h are one run.
    if (a.quantized()) check.multiple("pool_rows", shape.pool_rows, 128);
    return shape;
}

void check_weights(const Checker& check, const ForwardArguments& a, const RouteShape& shape) {
    const int64_t num_local = shape.num_experts / shape.num_ranks;
    const int64_t hidden = shape.hidden;
    const int64_t intermediate = shape.intermediate;
    const ScalarType type = a.quantized() ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
    check_operand(check, "w_gate_up", a.w_gate_up, {type}, {num_local, 2 * intermediate, hidden});
    check_operand(check, "w_down", a.w_down, {type}, {num_local, hidden, intermediate});
    if (!a.quantized()) return;
    check_operand(check, "gate_up_sf", *a.gate_up_scales, {ScalarType::Float},
                  {num_local, 2 * intermediate / 128, hidden / 128});
    check_operand(check, "down_sf", *a.down_scales, {ScalarType::Float},
                  {num_local, hidden / 128, intermediate / 128});
}

void forward(const Checker& check, const ForwardArguments& a) {
    const RouteShape shape = checked_forward_shape(check, a);
    const int64_t num_tokens = a.topk_idx.size(0);
    if (a.quantized())
        check_operand(check, "x", a.x, {ScalarType::BFloat16, ScalarType::Float8_e4m3fn},
                      {num_tokens, shape.hidden});
    else
        check_operand(check, "x", a.x, {ScalarType::BFloat16}, {num_tokens, shape.hidden});
    check_weights(check, a, shape);
    check_operand(check, "y", a.y, {ScalarType::BFloat16}, {num_tokens, shape.hidden});
    const int64_t saved_rows =
        a.quantized() ? 0 : checked_saved_rows(check, *a.saved_gate_up, shape.intermediate);
    if (!(a.clamp > 0)) check.fail("clamp is " + std::to_string(a.clamp) + ", must be above 0");
    check.range("delay_seed", a.delay_seed, 0, UINT32_MAX);
    check.range("trace_bytes", a.trace_bytes, 0, INT64_MAX);
    check.aligned("trace", static_cast<std::uintptr_t>(a.trace), 8);
    ForwardProblem problem{};
    problem.route = checked_problem(check, shape, a.topk_idx, a.topk_weights, a.summary, a.rank, true);
    check.same_device("x", a.x, a.topk_idx);
    check.same_device("w_gate_up", a.w_gate_up, a.topk_idx);
    check.same_device("w_down", a.w_down, a.topk_idx);
    check.same_device("y", a.y, a.topk_idx);
    problem.x = a.x.const_data_ptr();
    problem.x_is_e4m3 = a.x.scalar_type() == ScalarType::Float8_e4m3fn;
    problem.w_gate_up = a.w_gate_up.const_data_ptr();
    problem.w_down = a.w_down.const_data_ptr();
    if (a.quantized()) {
        check.same_device("gate_up_sf", *a.gate_up_scales, a.topk_idx);
        check.same_device("down_sf", *a.down_scales, a.topk_idx);
        problem.gate_up_scales = static_cast<const float*>(a.gate_up_scales->const_data_ptr());
        problem.down_scales = static_cast<const float*>(a.down_scales->const_data_ptr());
    }
    problem.y = a.y.mutable_data_ptr();
    if (saved_rows > 0) {
        check.same_device("saved_gate_up", *a.saved_gate_up, a.topk_idx);
        problem.saved_gate_up = a.saved_gate_up->mutable_data_ptr();
    }
    problem.saved_rows = saved_rows;
    problem.trace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(a.trace));
    problem.trace_bytes = a.trace_bytes;
    problem.clamp = static_cast<float>(a.clamp);
    problem.power_of_two = a.power_of_two;
    problem.delay_seed = static_cast<std::uint32_t>(a.delay_seed);
    const torch::stable::accelerator::DeviceGuard guard(a.topk_idx.get_device_index());
    problem.route.stream = current_stream(problem.route.device);
    const Status status = launch_forward(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace

void moe_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                 const Tensor& w_down, const Tensor& y, const Tensor& saved_gate_up, const Tensor& summary,
                 std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                 int64_t num_experts, int64_t pool_rows, bool canaries, int64_t backward, int64_t rank,
                 int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, int64_t delay_seed,
                 int64_t trace, int64_t trace_bytes) {
    forward(Checker("moe_forward"), {x,
                                     topk_idx,
                                     topk_weights,
                                     w_gate_up,
                                     nullptr,
                                     w_down,
                                     nullptr,
                                     y,
                                     &saved_gate_up,
                                     summary,
                                     {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns},
                                     max_tokens,
                                     num_experts,
                                     pool_rows,
                                     canaries,
                                     backward,
                                     clamp,
                                     false,
                                     delay_seed,
                                     trace,
                                     trace_bytes});
}

void moe_forward_fp8(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                     const Tensor& w_gate_up, const Tensor& gate_up_sf, const Tensor& w_down,
                     const Tensor& down_sf, const Tensor& y, const Tensor& summary,
                     std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                     int64_t num_experts, int64_t pool_rows, bool canaries, int64_t backward, int64_t rank,
                     int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp,
                     bool power_of_two, int64_t delay_seed, int64_t trace, int64_t trace_bytes) {
    forward(Checker("moe_forward_fp8"), {x,
                                         topk_idx,
                                         topk_weights,
                                         w_gate_up,
                                         &gate_up_sf,
                                         w_down,
                                         &down_sf,
                                         y,
                                         nullptr,
                                         summary,
                                         {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns},
                                         max_tokens,
                                         num_experts,
                                         pool_rows,
                                         canaries,
                                         backward,
                                         clamp,
                                         power_of_two,
                                         delay_seed,
                                         trace,
                                         trace_bytes});
}

}  // namespace mega_moe::binding
