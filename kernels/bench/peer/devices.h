#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "bench/common/check.h"

namespace mega_moe::bench {

// Empty when devices 0 and 1 can reach each other's memory, which is then enabled; else why they cannot.
inline std::string connect_two_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (count < 2) return "needs two devices, got " + std::to_string(count);
    for (int device = 0; device < 2; ++device) {
        int reachable = 0;
        check(cudaDeviceCanAccessPeer(&reachable, device, 1 - device), "cudaDeviceCanAccessPeer");
        if (reachable == 0) return "device " + std::to_string(device) + " cannot reach the other's memory";
        check(cudaSetDevice(device), "cudaSetDevice");
        const cudaError_t error = cudaDeviceEnablePeerAccess(1 - device, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            static_cast<void>(cudaGetLastError());
        } else {
            check(error, "cudaDeviceEnablePeerAccess");
        }
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    return {};
}

}  // namespace mega_moe::bench
