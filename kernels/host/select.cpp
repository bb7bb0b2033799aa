#include "host/select.h"

#include <cstdio>

#include "host/make_status.h"

namespace mega_moe {
namespace {

const char* op_name(Op op) noexcept {
    switch (op) {
        case Op::kStage:
            return "stage";
        case Op::kQuantizeWeights:
            return "quantize_weights";
        case Op::kRoute:
            return "route";
        case Op::kForward:
            return "forward";
        case Op::kForwardSaving:
            return "forward_saving";
        case Op::kForwardTrace:
            return "forward_trace";
        case Op::kBackward:
            return "backward";
        case Op::kBackwardSaving:
            return "backward_saving";
        case Op::kBackwardTrace:
            return "backward_trace";
        case Op::kBackwardGradients:
            return "backward_gradients";
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

}  // namespace

Status select_variant(const Variant* table, std::size_t size, Op op, Precision precision,
                      int compute_capability, const Variant*& found) noexcept {
    found = nullptr;
    char architectures[96] = "none";
    std::size_t length = 0;
    for (std::size_t i = 0; i < size; ++i) {
        const Variant& variant = table[i];
        if (variant.op != op || variant.precision != precision) continue;
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
    return error_status("%s (%s): the device has compute capability %d.%d, this build holds kernels for: %s",
                        op_name(op), precision_name(precision), compute_capability / 10,
                        compute_capability % 10, architectures);
}

}  // namespace mega_moe
