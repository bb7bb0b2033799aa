#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace mega_moe::bench {

// Throws what the runtime says; `what` names the call.
inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                                 cudaGetErrorString(error));
    }
}

}  // namespace mega_moe::bench
