#pragma once
#include <cstdint>

namespace mega_moe::binding {

// torch's current stream on a device, as cudaStream_t. Throws if this torch was built without CUDA.
void* current_stream(std::int32_t device);

}  // namespace mega_moe::binding
