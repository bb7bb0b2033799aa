#include "binding/stream.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

// torch loads extensions with all symbols bound at once, and only a torch with CUDA exports this one. Weak,
// it is null there instead of a failure to load.
#pragma weak aoti_torch_get_current_cuda_stream

namespace mega_moe::binding {

void* current_stream(std::int32_t device) {
    if (&aoti_torch_get_current_cuda_stream == nullptr) {
        throw std::runtime_error("this torch was built without CUDA, so it has no current stream");
    }
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
        throw std::runtime_error("torch did not return its current stream of cuda:" + std::to_string(device));
    }
    return stream;
}

}  // namespace mega_moe::binding
