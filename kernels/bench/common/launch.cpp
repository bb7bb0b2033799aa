#include "bench/common/launch.h"

#include "bench/common/check.h"

namespace mega_moe::bench {
namespace {

int attribute(cudaDeviceAttr name) {
    int device = 0;
    int value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace

cudaError_t launch(const void* kernel, const LaunchShape& shape, void* parameter, cudaStream_t stream) {
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    if (shape.cluster > 1) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeClusterDimension;
        a.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
        a.val.clusterDim.y = 1;
        a.val.clusterDim.z = 1;
    }
    if (shape.cooperative) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeCooperative;
        a.val.cooperative = 1;
    }
    void* parameters[] = {parameter};
    error = cudaLaunchKernelExC(&config, kernel, parameters);
    // The runtime would hand the same error to the next call that asks for the last one.
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return error;
}

int max_shared_bytes() {
    return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}
int num_sms() {
    return attribute(cudaDevAttrMultiProcessorCount);
}

}  // namespace mega_moe::bench
