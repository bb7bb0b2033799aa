#include "host/select.h"

#include <cstdio>

#include "host/make_status.h"

namespace mega_moe {
namespace {

const char* op_name(Op op) noexcept {
    switch (op) {
        case Op::kQuantizeWeights:
            return "quantize_weights";
        case Op::kRoute:
            return "route";
        case Op::kForward:
            return "forward";
        case Op::kBackward:
            return "backward";
        case Op::kClockProbe:
            return "clock_probe";
    }
    return "?";
}

const char* precision_name(Precision precision) noexcept {
    switch (precision) {
        case Precision::kNone:
            return "any precision";
        case Precision::kBf16:
            return "bf16";
        case Precision::kFp8:
            return "fp8";
    }
    return "?";
}

// A tracing kernel that can save gate and up serves calls that do not: it is a tool, not timed, and one
// instance fewer to compile.
bool serves(const VariantKey& kernel, const VariantKey& key) noexcept {
    const bool saves = kernel.saved == key.saved || (kernel.trace && kernel.saved == Saved::kGateUp);
    return kernel.op == key.op && kernel.precision == key.precision && kernel.wgrad == key.wgrad &&
           kernel.trace == key.trace && saves;
}

}  // namespace

Status select_variant(const Variant* table, std::size_t size, const VariantKey& key, int compute_capability,
                      const Variant*& found) noexcept {
    found = nullptr;
    char architectures[96] = "none";
    std::size_t length = 0;
    for (std::size_t i = 0; i < size; ++i) {
        const Variant& variant = table[i];
        if (!serves(variant.key, key)) continue;
        if (variant.compute_capability == compute_capability) {
            found = &variant;
            return ok_status();
        }
        const int written = std::snprintf(architectures + length, sizeof(architectures) - length, "%s%s",
                                          length == 0 ? "" : ", ", variant.architecture);
        if (written > 0 && length + static_cast<std::size_t>(written) < sizeof(architectures)) {
            length += static_cast<std::size_t>(written);
        }
    }
    return error_status(
        "%s (%s%s%s%s): the device has compute capability %d.%d, this build holds kernels for: %s",
        op_name(key.op), precision_name(key.precision), key.wgrad == Precision::kFp8 ? ", dW in fp8" : "",
        key.saved == Saved::kGateUp ? ", saved gate and up" : "", key.trace ? ", trace" : "",
        compute_capability / 10, compute_capability % 10, architectures);
}

}  // namespace mega_moe
