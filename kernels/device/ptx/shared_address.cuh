#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Address within the shared window, as the instructions with .shared operands take it. In a cluster launch
// bits 24 and up name the block.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace mega_moe::device::ptx
