#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "emulate/fibers.h"

// What device code uses of CUDA, apart from PTX. Included before it.
#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

struct uint4 {
    std::uint32_t x, y, z, w;
};

#define threadIdx (mega_moe::emulate::thread_index())
#define blockIdx (mega_moe::emulate::cta_index())
#define gridDim (mega_moe::emulate::grid_size())

inline void __syncthreads() {
    mega_moe::emulate::meet_cta();
}
inline void __syncwarp() {
    mega_moe::emulate::meet_warp();
}
inline int __popc(std::uint32_t v) {
    return __builtin_popcount(v);
}
inline int __ffs(int v) {
    return __builtin_ffs(v);
}
inline std::uint32_t atomicAdd(std::uint32_t* address, std::uint32_t v) {
    const std::uint32_t old = *address;
    *address += v;
    return old;
}
inline std::uint32_t atomicOr(std::uint32_t* address, std::uint32_t v) {
    const std::uint32_t old = *address;
    *address |= v;
    return old;
}
inline std::uint32_t __ballot_sync(std::uint32_t, bool predicate) {
    const std::uint32_t* all = mega_moe::emulate::exchange(predicate);
    std::uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane)
        mask |= all[lane] << lane;
    return mask;
}
inline int __any_sync(std::uint32_t lanes, bool predicate) {
    return __ballot_sync(lanes, predicate) != 0;
}
inline std::uint32_t __reduce_add_sync(std::uint32_t, std::uint32_t v) {
    const std::uint32_t* all = mega_moe::emulate::exchange(v);
    std::uint32_t total = 0;
    for (int lane = 0; lane < 32; ++lane)
        total += all[lane];
    return total;
}
inline std::uint32_t __reduce_max_sync(std::uint32_t, std::uint32_t v) {
    const std::uint32_t* all = mega_moe::emulate::exchange(v);
    return *std::max_element(all, all + 32);
}
inline std::uint32_t __shfl_sync(std::uint32_t, std::uint32_t v, int lane) {
    return mega_moe::emulate::exchange(v)[lane];
}
inline std::uint32_t __shfl_up_sync(std::uint32_t, std::uint32_t v, std::uint32_t distance) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t* all = mega_moe::emulate::exchange(v);
    return all[lane < distance ? lane : lane - distance];
}
