#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

#define MEGA_MOE_READ(NAME, TYPE, MOVE, CONSTRAINT)     \
    __device__ __forceinline__ TYPE NAME() {            \
        TYPE value;                                     \
        asm volatile(MOVE ";" : "=" CONSTRAINT(value)); \
        return value;                                   \
    }

MEGA_MOE_READ(sm_id, uint32_t, "mov.u32 %0, %%smid", "r")
// threadIdx.x, blockIdx.x and gridDim.x, read again where they are used: a large kernel keeps the built-in
// forms in registers from their first use to their last, and spills them.
MEGA_MOE_READ(thread_id, uint32_t, "mov.u32 %0, %%tid.x", "r")
MEGA_MOE_READ(cta_id, uint32_t, "mov.u32 %0, %%ctaid.x", "r")
MEGA_MOE_READ(num_ctas, uint32_t, "mov.u32 %0, %%nctaid.x", "r")
MEGA_MOE_READ(sm_clock, int64_t, "mov.u64 %0, %%clock64", "l")
// Nanoseconds, the same on all SMs.
MEGA_MOE_READ(global_timer, int64_t, "mov.u64 %0, %%globaltimer", "l")

#undef MEGA_MOE_READ

__device__ __forceinline__ void sleep_ns(uint32_t ns) {
    asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

}  // namespace mega_moe::device::ptx
