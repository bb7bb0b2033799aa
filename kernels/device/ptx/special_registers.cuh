#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

__device__ __forceinline__ uint32_t sm_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

__device__ __forceinline__ int64_t sm_clock() {
    int64_t ticks;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(ticks));
    return ticks;
}

// Nanoseconds, the same on all SMs.
__device__ __forceinline__ int64_t global_timer() {
    int64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ void sleep_ns(uint32_t ns) {
    asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

}  // namespace mega_moe::device::ptx
