#include "host/device_facts.h"

#include <cuda_runtime_api.h>

#include "host/make_status.h"

namespace mega_moe {

Status read_device_facts(int device, DeviceFacts& facts) noexcept {
    int major = 0;
    int minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&facts.num_sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
        error =
            cudaDeviceGetAttribute(&facts.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    facts.compute_capability = 10 * major + minor;
    return cuda_status(error, "attributes of the device");
}

}  // namespace mega_moe
