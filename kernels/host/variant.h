#pragma once
#include "mega_moe/mode.h"

namespace mega_moe {

enum class Op {
    kStage,
    kQuantizeWeights,
    kRoute,
    kForward,
    kForwardSaving,
    kForwardTrace,
    kBackward,
    kBackwardSaving,
    kBackwardTrace,
    kBackwardGradients,
    kClockProbe
};


// One compiled kernel: what variants.toml says of it and how to reach it.
struct Variant {
    const char* name;
    Op op;
    Precision precision;
    const char* architecture;  // as nvcc names it
    int compute_capability;    // 10 * major + minor; the cubin runs on this one only
    int threads;
    int vectors_per_thread;
    int stages;
    const void* (*kernel)();  // the function that cudaLaunchKernelExC takes
};

}  // namespace mega_moe
