#include "mega_moe/layer.h"

#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "binding/check.h"
#include "binding/operands.h"
#include "binding/ops.h"
#include "binding/rank.h"

namespace mega_moe::binding {
namespace {

constexpr ScalarType kBf16 = ScalarType::BFloat16;
constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;
constexpr ScalarType kFp32 = ScalarType::Float;

Activation unpack_activation(const Checker& check, const std::string& kind, std::optional<double> clamp,
                             std::optional<double> alpha) {
    if (kind != "swiglu") check.fail("activation is '" + kind + "', must be 'swiglu'");
    if (clamp.has_value() && !(*clamp > 0))
        check.fail("clamp is " + std::to_string(*clamp) + ", must be above 0");
    if (alpha.has_value()) check.fail("alpha is " + std::to_string(*alpha) + ", must be None for swiglu");
    return {ActivationKind::kSwiglu, static_cast<float>(clamp.value_or(INFINITY)), 1.0f};
}

Probes unpack_probes(const Checker& check, Operands& operands, const MaybeTensor& trace, int64_t delay_seed) {
    check.range("delay_seed", delay_seed, 0, UINT32_MAX);
    Probes probes{};
    probes.delay_seed = static_cast<std::uint32_t>(delay_seed);
    if (!trace.has_value()) return probes;
    check.dims("trace", *trace, 4);
    probes.trace = operands.result("trace", *trace, {ScalarType::Long},
                                   {trace->size(0), trace->size(1), trace->size(2), 3}, kByElement);
    probes.trace_bytes = trace->numel() * 8;
    return probes;
}

SavedGateUp unpack_saved(const Checker& check, Operands& operands, const MaybeTensor& saved,
                         const BufferShape& shape, Direction direction) {
    const bool backward = direction == Direction::kBackward;
    if (!saved.has_value()) return {nullptr, 0};
    check.dims("saved_gate_up", *saved, 2);
    const int64_t rows = saved->size(0);
    const Sizes sizes{rows, 2 * shape.intermediate};
    // The backward reads it only, through the one struct of both directions.
    void* memory = backward ? const_cast<void*>(operands.input("saved_gate_up", *saved, {kBf16}, sizes))
                            : operands.result("saved_gate_up", *saved, {kBf16}, sizes);
    check.range("rows of saved_gate_up", rows, 0, INT32_MAX);
    check.multiple("rows of saved_gate_up", rows, 128);
    return {memory, rows};
}

// The tensors of either direction: x and the weights, and what fp8 adds.
struct Weights {
    const Tensor& w_gate_up;
    const MaybeTensor& w_down;
    const MaybeTensor& w_gate_up_t;
    const MaybeTensor& w_down_t;
    const MaybeTensor& gate_up_sf;
    const MaybeTensor& down_sf;
};

void unpack_weights(Operands& operands, const Weights& w, const BufferShape& shape, Direction direction,
                    LayerInputs& inputs, Fp8Weights& fp8) {
    const int64_t experts = shape.num_local();
    const int64_t hidden = shape.hidden;
    const int64_t inner = shape.intermediate;
    const bool backward = direction == Direction::kBackward;
    const bool quantized = (backward ? shape.mode.backward : shape.mode.forward) == Precision::kFp8;
    const bool transposed = quantized && backward;
    const ScalarType type = quantized ? kE4m3 : kBf16;
    const char* where = backward ? "the backward is in fp8" : "the forward is in fp8";
    const char* where_down = "the backward is not in fp8";
    inputs.w_gate_up = operands.input("w_gate_up", w.w_gate_up, {type}, {experts, 2 * inner, hidden});
    inputs.w_down =
        operands.input("w_down", w.w_down, {type}, {experts, hidden, inner}, !transposed, where_down);
    fp8.w_gate_up_t = operands.input("w_gate_up_t", w.w_gate_up_t, {kE4m3}, {experts, hidden, 2 * inner},
                                     transposed, where);
    fp8.w_down_t =
        operands.input("w_down_t", w.w_down_t, {kE4m3}, {experts, inner, hidden}, transposed, where);
    fp8.gate_up_sf = static_cast<const float*>(operands.input(
        "gate_up_sf", w.gate_up_sf, {kFp32}, {experts, 2 * inner / 128, hidden / 128}, quantized, where));
    fp8.down_sf = static_cast<const float*>(operands.input(
        "down_sf", w.down_sf, {kFp32}, {experts, hidden / 128, inner / 128}, quantized, where));
}

void raise_unless_ok(const Checker& check, const Status& status) {
    if (!status.ok) check.fail(status.message);
}

}  // namespace

void moe_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                 const Tensor& w_down, MaybeTensor gate_up_sf, MaybeTensor down_sf, const Tensor& y,
                 MaybeTensor saved_gate_up, const Tensor& summary, Words rank, std::string activation,
                 std::optional<double> clamp, std::optional<double> alpha, MaybeTensor trace,
                 int64_t delay_seed) {
    const Checker check("moe_forward");
    Operands operands(check);
    ForwardProblem problem{};
    problem.call = unpack_call(check, rank, operands, topk_idx, topk_weights, summary);
    const BufferShape& shape = problem.call.shape;
    const int64_t num_tokens = problem.call.num_tokens;
    if (shape.mode.forward == Precision::kNone) check.fail("the buffer is laid out for routing alone");
    if (shape.mode.forward == Precision::kFp8)
        problem.call.inputs.x = operands.input("x", x, {kBf16, kE4m3}, {num_tokens, shape.hidden});
    else
        problem.call.inputs.x = operands.input("x", x, {kBf16}, {num_tokens, shape.hidden});
    // Whoever has quantized x has done so where the buffer stages it.
    problem.x_is_staged = x.scalar_type() == kE4m3;
    unpack_weights(operands, {w_gate_up, w_down, {}, {}, gate_up_sf, down_sf}, shape, Direction::kForward,
                   problem.call.inputs, problem.fp8);
    problem.y = operands.result("y", y, {kBf16}, {num_tokens, shape.hidden});
    problem.saved = unpack_saved(check, operands, saved_gate_up, shape, Direction::kForward);
    problem.activation = unpack_activation(check, activation, clamp, alpha);
    problem.probes = unpack_probes(check, operands, trace, delay_seed);
    place_call(check, operands, topk_idx, problem.call);
    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    raise_unless_ok(check, launch_forward(problem));
}

void moe_backward(const Tensor& dy, const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                  const Tensor& w_gate_up, MaybeTensor w_down, MaybeTensor w_gate_up_t, MaybeTensor w_down_t,
                  MaybeTensor gate_up_sf, MaybeTensor down_sf, MaybeTensor saved_gate_up, MaybeTensor dx,
                  MaybeTensor dtopk, MaybeTensor dw_gate_up, MaybeTensor dw_down, const Tensor& summary,
                  Words rank, std::string activation, std::optional<double> clamp,
                  std::optional<double> alpha, bool accumulate, MaybeTensor trace, int64_t delay_seed) {
    const Checker check("moe_backward");
    Operands operands(check);
    BackwardProblem problem{};
    problem.call = unpack_call(check, rank, operands, topk_idx, topk_weights, summary);
    const BufferShape& shape = problem.call.shape;
    const int64_t num_tokens = problem.call.num_tokens;
    const int64_t experts = shape.num_local();
    if (shape.mode.backward == Precision::kNone) check.fail("the buffer is laid out without a backward");
    problem.call.inputs.x = operands.input("x", x, {kBf16}, {num_tokens, shape.hidden});
    problem.dy = operands.input("dy", dy, {kBf16}, {num_tokens, shape.hidden});
    unpack_weights(operands, {w_gate_up, w_down, w_gate_up_t, w_down_t, gate_up_sf, down_sf}, shape,
                   Direction::kBackward, problem.call.inputs, problem.fp8);
    problem.saved = unpack_saved(check, operands, saved_gate_up, shape, Direction::kBackward);
    problem.dx = operands.result("dx", dx, {kBf16}, {num_tokens, shape.hidden});
    problem.dtopk = operands.result("dtopk", dtopk, {kFp32}, {num_tokens, shape.top_k});
    problem.dw_gate_up = operands.result("dw_gate_up", dw_gate_up, {kBf16, kFp32},
                                         {experts, 2 * shape.intermediate, shape.hidden});
    problem.dw_down =
        operands.result("dw_down", dw_down, {kBf16, kFp32}, {experts, shape.hidden, shape.intermediate});
    if (dw_gate_up.has_value() && dw_down.has_value())
        check.dtype("dw_down", *dw_down, {dw_gate_up->scalar_type()});
    problem.needs_dx = dx.has_value();
    problem.needs_dtopk = dtopk.has_value();
    const MaybeTensor& dw = dw_gate_up.has_value() ? dw_gate_up : dw_down;
    problem.dw_is_fp32 = dw.has_value() && dw->scalar_type() == kFp32;
    problem.accumulate = accumulate;
    problem.activation = unpack_activation(check, activation, clamp, alpha);
    problem.probes = unpack_probes(check, operands, trace, delay_seed);
    place_call(check, operands, topk_idx, problem.call);
    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    raise_unless_ok(check, launch_backward(problem));
}

}  // namespace mega_moe::binding
