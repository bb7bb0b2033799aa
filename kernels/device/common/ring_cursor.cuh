#pragma once
#include <cstdint>

#include "device/ptx/mbarrier.cuh"

namespace mega_moe::device {

// Position in a ring of `Count` buffers, with the parity of the phase that their barriers are in.
template <int Count>
struct RingCursor {
    int at = 0;
    std::uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == Count) {
            at = 0;
            parity ^= 1;
        }
    }
};

}  // namespace mega_moe::device
