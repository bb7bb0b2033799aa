#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

__device__ __forceinline__ uint32_t sm_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

// threadIdx.x, blockIdx.x and gridDim.x, read again where they are used: a large kernel keeps the built-in
// forms in registers from their first use to their last, and spills them.
__device__ __forceinline__ uint32_t thread_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    return id;
}
__device__ __forceinline__ uint32_t cta_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(id));
    return id;
}
__device__ __forceinline__ uint32_t num_ctas() {
    uint32_t count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
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
