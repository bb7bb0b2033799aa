#include <torch/csrc/stable/library.h>

#include "binding/ops.h"
#include "mega_moe/build_info.h"

namespace mega_moe::binding {

std::string build_info() {
    return mega_moe::build_info();
}

}  // namespace mega_moe::binding

STABLE_TORCH_LIBRARY(mega_moe_kernels, m) {
    m.def("staging_layout(int max_tokens, int top_k, int hidden, bool quantise) -> int[]");
    m.def(
        "stage(Tensor x, Tensor topk_idx, Tensor topk_weights, int buffer, int buffer_bytes, int max_tokens, "
        "int num_experts, bool quantise) -> ()");
    m.def("clock_probe(Tensor(a!) out) -> ()");
    m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CompositeExplicitAutograd, m) {
    m.impl("staging_layout", TORCH_BOX(&mega_moe::binding::staging_layout));
    m.impl("build_info", TORCH_BOX(&mega_moe::binding::build_info));
}

STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CUDA, m) {
    m.impl("stage", TORCH_BOX(&mega_moe::binding::stage));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}

// A tensor on the CPU then meets the checks, which name the argument, instead of the dispatcher's list of
// backends.
STABLE_TORCH_LIBRARY_IMPL(mega_moe_kernels, CPU, m) {
    m.impl("stage", TORCH_BOX(&mega_moe::binding::stage));
    m.impl("clock_probe", TORCH_BOX(&mega_moe::binding::clock_probe));
}
