#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Barriers of some of a CTA's warps; 0 is that of __syncthreads.
inline constexpr int kBothWarpgroups = 1;
inline constexpr int kFirstWarpgroup = 2;

// Until `threads` threads, a multiple of 32, are here; what they wrote to memory before it is seen.
template <int Barrier>
__device__ __forceinline__ void sync_threads(int threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(Barrier), "r"(threads) : "memory");
}

}  // namespace mega_moe::device::ptx
