#include "host/launch.h"

#include <cuda_runtime_api.h>

#include <iterator>

#include "host/make_status.h"
#include "host/select.h"
#include "host/variants.h"

namespace mega_moe {

Status prepare_launch(const VariantKey& key, int device, DeviceFacts& facts,
                      const Variant*& variant) noexcept {
    // This library has a CUDA runtime of its own, whose current device need not be the one torch set in its
    // copy.
    Status status = cuda_status(cudaSetDevice(device), "cudaSetDevice");
    if (status.ok) status = read_device_facts(device, facts);
    if (!status.ok) return status;
    return select_variant(kVariants, std::size(kVariants), key, facts.compute_capability, variant);
}

namespace {

Status launch(const Variant& variant, const layout::KernelFacts& kernel, unsigned blocks, int shared_bytes,
              bool cooperative, void* parameter, void* stream) noexcept {
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return cuda_status(error, variant.name);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (cooperative) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeCooperative;
        a.val.cooperative = 1;
    }
    if (kernel.cluster_size > 1) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeClusterDimension;
        a.val.clusterDim = {static_cast<unsigned>(kernel.cluster_size), 1, 1};
    }
    void* parameters[] = {parameter};
    return cuda_status(cudaLaunchKernelExC(&config, kernel.kernel, parameters), variant.name);
}

}  // namespace

Status launch_variant(const Variant& variant, const layout::KernelFacts& kernel, unsigned blocks,
                      int shared_bytes, void* parameter, void* stream) noexcept {
    return launch(variant, kernel, blocks, shared_bytes, false, parameter, stream);
}

Status launch_cooperative(const Variant& variant, const layout::KernelFacts& kernel, unsigned blocks,
                          int shared_bytes, void* parameter, void* stream) noexcept {
    return launch(variant, kernel, blocks, shared_bytes, true, parameter, stream);
}

}  // namespace mega_moe
