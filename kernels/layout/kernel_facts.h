#pragma once

namespace mega_moe::layout {

// What the launcher must know of a compiled kernel, whose instance fills it from the kernel's own constants.
struct KernelFacts {
    const void* kernel;  // what cudaLaunchKernelExC takes
    int threads;         // of a CTA
    int cluster_size = 1;
    // Set for kernels of the layer alone:
    int shared_bytes = 0;  // dynamic shared memory of a CTA
    int route_bytes = 0;   // how much of it the routing phase may use
    int block_m = 0;       // rows and columns of a CTA's tile
    int block_n = 0;
};

}  // namespace mega_moe::layout
