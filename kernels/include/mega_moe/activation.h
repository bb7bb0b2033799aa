#pragma once
#include <cstdint>

namespace mega_moe {

enum class ActivationKind : std::int32_t {
    kSwiglu,  // silu(min(g, clamp)) * clamp(u, -clamp, clamp)
};

// Between the two projections. A kind reads only the numbers that it has.
struct Activation {
    ActivationKind kind;
    float clamp;  // +inf: none
    float alpha;
};

}  // namespace mega_moe
