#pragma once
#include <cuda_runtime_api.h>

namespace mega_moe::bench {

struct LaunchShape {
    int blocks;
    int threads;
    int shared_bytes;
    int cluster = 1;
    bool cooperative = false;
};

// On the current device; the caller judges the error. `parameter` points to the kernel's only one.
cudaError_t launch(const void* kernel, const LaunchShape& shape, void* parameter, cudaStream_t stream);

// The most dynamic shared memory that a block may ask for, and the number of SMs, of the current device.
int max_shared_bytes();
int num_sms();

}  // namespace mega_moe::bench
