#include <torch/csrc/stable/library.h>

#include "binding/ops.h"
#include "mega_moe/build_info.h"

namespace mega_moe::binding {

std::string build_info() {
    return mega_moe::build_info();
}

}  // namespace mega_moe::binding

STABLE_TORCH_LIBRARY(mega_moe_kernels, m) {
    // e4m3 copies of a bf16 weight [E, N, K], scaled per 128 x 128 block.
    m.def(
        "quantize_weights(Tensor weight, Tensor(a!)? codes, Tensor(b!)? codes_t, Tensor(c!) scales, "
        "bool power_of_two) -> ()");
    // shape, rank: binding/rank.h.
    m.def("symmetric_layout(int[] shape) -> int[]");
    m.def("workspace_layout(int[] shape) -> int[]");
    m.def("symmetric_parts() -> str");
    m.def("workspace_parts() -> str");
    m.def(
        "route(Tensor topk_idx, Tensor? topk_weights, Tensor(a!) summary, int[] rank, int refused_tokens) "
        "-> ()");
    // In fp8 the weights are e4m3 with scale factors; x is bf16 and quantized by the kernel, or e4m3 and lies
    // where the buffer stages it. saved_gate_up: bf16 [rows, 2 * intermediate], of the rows with the lowest
    // slots, for moe_backward alone to read. trace: int64 [CTAs, roles, events, 3], zero. delay_seed: pauses
    // in the communication roles, 0 for none.
    m.def(
        "moe_forward(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
        "Tensor? gate_up_sf, Tensor? down_sf, Tensor(a!) y, Tensor(b!)? saved_gate_up, Tensor(c!) summary, "
        "int[] rank, str activation, float? clamp, float? alpha, Tensor(d!)? trace=None, int delay_seed=0) "
        "-> ()");
    // In fp8 w_gate_up and the transposed copies are e4m3, and w_down is None. saved_gate_up: what
    // moe_forward left for the same tokens, else gate and up are recomputed. Of a result that is None
    // nothing is computed. Weight gradients are bf16 or fp32, set, or added to when accumulating.
    m.def(
        "moe_backward(Tensor dy, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, "
        "Tensor? w_down, Tensor? w_gate_up_t, Tensor? w_down_t, Tensor? gate_up_sf, Tensor? down_sf, "
        "Tensor? saved_gate_up, Tensor(a!)? dx, Tensor(b!)? dtopk, Tensor(c!)? dw_gate_up, "
        "Tensor(d!)? dw_down, Tensor(e!) summary, int[] rank, str activation, float? clamp, float? alpha, "
        "bool accumulate, Tensor(f!)? trace=None, int delay_seed=0) -> ()");
    m.def("clock_probe(Tensor(a!) out) -> ()");
    m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CompositeExplicitAutograd, m) {
    m.impl("symmetric_layout", TORCH_BOX(&mega_moe::binding::symmetric_layout));
    m.impl("workspace_layout", TORCH_BOX(&mega_moe::binding::workspace_layout));
    m.impl("symmetric_parts", TORCH_BOX(&mega_moe::binding::symmetric_parts));
    m.impl("workspace_parts", TORCH_BOX(&mega_moe::binding::workspace_parts));
    m.impl("build_info", TORCH_BOX(&mega_moe::binding::build_info));
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CUDA, m) {
    m.impl("quantize_weights", TORCH_BOX(&mega_moe::binding::quantize_weights));
    m.impl("route", TORCH_BOX(&mega_moe::binding::route));
    m.impl("moe_forward", TORCH_BOX(&mega_moe::binding::moe_forward));
    m.impl("moe_backward", TORCH_BOX(&mega_moe::binding::moe_backward));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}

// A tensor on the CPU then meets the checks, which name the argument, instead of the dispatcher's list of
// backends.
STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CPU, m) {
    m.impl("quantize_weights", TORCH_BOX(&mega_moe::binding::quantize_weights));
    m.impl("route", TORCH_BOX(&mega_moe::binding::route));
    m.impl("moe_forward", TORCH_BOX(&mega_moe::binding::moe_forward));
    m.impl("moe_backward", TORCH_BOX(&mega_moe::binding::moe_backward));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}
