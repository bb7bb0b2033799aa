#include "mega_moe/layer.h"

#include <numeric>

#include "host/variants.h"

namespace mega_moe {

Multiples layer_multiples(const Mode& mode, Direction direction) noexcept {
    const bool forward = direction == Direction::kForward;
    const Op op = forward ? Op::kForward : Op::kBackward;
    const Precision precision = forward ? mode.forward : mode.backward;
    const Precision wgrad = forward ? Precision::kNone : mode.wgrad;
    Multiples found{1, 1};
    for (const Variant& variant : kVariants) {
        const VariantKey& key = variant.key;
        if (key.op != op || key.precision != precision || key.wgrad != wgrad) continue;
        found.hidden = std::lcm(found.hidden, variant.hidden_multiple);
        found.intermediate = std::lcm(found.intermediate, variant.intermediate_multiple);
    }
    return found;
}

}  // namespace mega_moe
