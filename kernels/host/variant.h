#pragma once
#include "layout/kernel_facts.h"
#include "mega_moe/mode.h"

namespace mega_moe {

enum class Op { kQuantizeWeights, kRoute, kForward, kBackward, kClockProbe };

// What a launch wants of a kernel.
struct VariantKey {
    Op op;
    Precision precision = Precision::kNone;
    Precision wgrad = Precision::kNone;  // of a backward
    Saved saved = Saved::kNothing;
    bool trace = false;
};

// One compiled kernel: what variants.toml says of it and how to reach it.
struct Variant {
    const char* name;
    VariantKey key;
    const char* architecture;  // as nvcc names it
    int compute_capability;    // 10 * major + minor; the cubin runs on this one only
    int hidden_multiple;       // 1: of nothing
    int intermediate_multiple;
    layout::KernelFacts (*facts)();
};

}  // namespace mega_moe
