#include <torch/csrc/stable/library.h>

#include "binding/ops.h"
#include "mega_moe/build_info.h"

namespace mega_moe::binding {

std::string build_info() {
    return mega_moe::build_info();
}

}  // namespace mega_moe::binding

STABLE_TORCH_LIBRARY(mega_moe_kernels, m) {
    m.def("staging_layout(int max_tokens, int top_k, int hidden, bool quantize) -> int[]");
    m.def(
        "stage(Tensor x, Tensor topk_idx, Tensor topk_weights, int buffer, int buffer_bytes, int max_tokens, "
        "int num_experts, bool quantize, bool power_of_two) -> ()");
    // e4m3 copies of a bf16 weight [E, N, K], scaled per 128 x 128 block. A copy that nobody wants is an
    // empty tensor of one dimension.
    m.def(
        "quantize_weights(Tensor weight, Tensor(a!) codes, Tensor(b!) codes_transposed, Tensor(c!) scales, "
        "bool power_of_two) -> ()");
    // What the memory of the routing tables depends on; pool_rows 0 is the largest useful pool, one chunk for
    // any routing. backward: 0 without what the backward needs besides, 1 with it, 2 with what it needs in
    // fp8.
    m.def(
        "symmetric_layout(int max_tokens, int top_k, int num_experts, int hidden, int intermediate, int "
        "num_ranks, int pool_rows, "
        "bool quantize, bool home, bool canaries, int backward) -> int[]");
    m.def(
        "workspace_layout(int max_tokens, int top_k, int num_experts, int hidden, int intermediate, int "
        "num_ranks, int pool_rows, "
        "bool quantize, bool home, bool canaries, int backward) -> int[]");
    m.def("symmetric_parts() -> str");
    m.def("workspace_parts() -> str");
    m.def(
        "route(Tensor topk_idx, Tensor topk_weights, Tensor(a!) summary, int[] buffers, int workspace, int "
        "record, "
        "int max_tokens, int num_experts, int hidden, int intermediate, int pool_rows, bool quantize, bool "
        "home, "
        "bool "
        "canaries, int backward, int rank, "
        "int num_sms, int arrival_ns, int progress_ns, int refused_tokens, bool weighted) -> ()");
    // saved_gate_up: bf16 [rows, 2 * intermediate] that only moe_backward reads, of the rows with the lowest
    // slots; an empty tensor of one dimension saves nothing. clamp: of gate and up, +inf for none.
    // delay_seed: pauses in the communication roles, 0 for none. trace: address of int64 [CTAs, roles,
    // events, 3], 0 for none.
    m.def(
        "moe_forward(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
        "Tensor(a!) y, Tensor(b!) saved_gate_up, Tensor(c!) summary, int[] buffers, int workspace, int "
        "record, int max_tokens, "
        "int num_experts, int pool_rows, bool canaries, int backward, int rank, int num_sms, int "
        "arrival_ns, "
        "int progress_ns, float clamp, int delay_seed, int trace, int trace_bytes) -> ()");
    // The same in e4m3: weights with an fp32 scale factor for each 128 x 128 of them, x quantized by the
    // kernel, or e4m3 and then where the buffer stages it, beside its scale factors. power_of_two: what the
    // kernel quantizes has scale factors rounded up to one. The shape of the buffer has `quantize`.
    m.def(
        "moe_forward_fp8(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor "
        "gate_up_sf, "
        "Tensor w_down, Tensor down_sf, Tensor(a!) y, Tensor(b!) summary, int[] buffers, int workspace, int "
        "record, int max_tokens, int num_experts, int pool_rows, bool canaries, int backward, int rank, int "
        "num_sms, int arrival_ns, int progress_ns, float clamp, bool power_of_two, int delay_seed, "
        "int trace, int trace_bytes) -> ()");
    // saved_gate_up: what moe_forward left there for the same tokens; empty: it is computed again. A result
    // that nobody wants is an empty tensor of one dimension. Weight gradients, bf16 or fp32, are
    // set, or added to when accumulating. The shape of the buffer has `backward`.
    m.def(
        "moe_backward(Tensor x, Tensor dy, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor "
        "w_down, "
        "Tensor saved_gate_up, Tensor(a!) dx, Tensor(b!) dtopk, Tensor(c!) dw_gate_up, Tensor(d!) dw_down, "
        "Tensor(e!) summary, "
        "int[] buffers, int workspace, int record, int max_tokens, int num_experts, int pool_rows, "
        "bool canaries, int rank, int num_sms, int arrival_ns, int progress_ns, float clamp, bool "
        "accumulate, "
        "int delay_seed, int trace, int trace_bytes) -> ()");
    // The same with gate and up, the gradient of h and dx in e4m3: of w_gate_up both copies, of w_down the
    // transposed one, and their scale factors. Weight gradients are of bf16 all the same, unless
    // quantize_gradients. quantize: of the forward, by which the shape of the buffer differs.
    m.def(
        "moe_backward_fp8(Tensor x, Tensor dy, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, "
        "Tensor "
        "w_gate_up_t, Tensor gate_up_sf, Tensor w_down_t, Tensor down_sf, Tensor(a!) dx, Tensor(b!) dtopk, "
        "Tensor(c!) dw_gate_up, Tensor(d!) dw_down, Tensor(e!) summary, int[] buffers, int workspace, int "
        "record, int max_tokens, int num_experts, int pool_rows, bool canaries, bool quantize, bool "
        "quantize_gradients, int rank, int num_sms, int arrival_ns, int progress_ns, float clamp, bool "
        "power_of_two, bool accumulate, int delay_seed, int trace, int trace_bytes) -> ()");
    m.def("clock_probe(Tensor(a!) out) -> ()");
    m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CompositeExplicitAutograd, m) {
    m.impl("staging_layout", TORCH_BOX(&mega_moe::binding::staging_layout));
    m.impl("symmetric_layout", TORCH_BOX(&mega_moe::binding::symmetric_layout));
    m.impl("workspace_layout", TORCH_BOX(&mega_moe::binding::workspace_layout));
    m.impl("symmetric_parts", TORCH_BOX(&mega_moe::binding::symmetric_parts));
    m.impl("workspace_parts", TORCH_BOX(&mega_moe::binding::workspace_parts));
    m.impl("build_info", TORCH_BOX(&mega_moe::binding::build_info));
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CUDA, m) {
    m.impl("stage", TORCH_BOX(&mega_moe::binding::stage));
    m.impl("quantize_weights", TORCH_BOX(&mega_moe::binding::quantize_weights));
    m.impl("route", TORCH_BOX(&mega_moe::binding::route));
    m.impl("moe_forward", TORCH_BOX(&mega_moe::binding::moe_forward));
    m.impl("moe_forward_fp8", TORCH_BOX(&mega_moe::binding::moe_forward_fp8));
    m.impl("moe_backward", TORCH_BOX(&mega_moe::binding::moe_backward));
    m.impl("moe_backward_fp8", TORCH_BOX(&mega_moe::binding::moe_backward_fp8));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}

// A tensor on the CPU then meets the checks, which name the argument, instead of the dispatcher's list of
// backends.
STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CPU, m) {
    m.impl("stage", TORCH_BOX(&mega_moe::binding::stage));
    m.impl("quantize_weights", TORCH_BOX(&mega_moe::binding::quantize_weights));
    m.impl("route", TORCH_BOX(&mega_moe::binding::route));
    m.impl("moe_forward", TORCH_BOX(&mega_moe::binding::moe_forward));
    m.impl("moe_forward_fp8", TORCH_BOX(&mega_moe::binding::moe_forward_fp8));
    m.impl("moe_backward", TORCH_BOX(&mega_moe::binding::moe_backward));
    m.impl("moe_backward_fp8", TORCH_BOX(&mega_moe::binding::moe_backward_fp8));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}
