#pragma once
#include <cstdint>

// Loads and stores with a memory order: "gpu" for words of one device, "sys" for words that peers read or
// write.
namespace mega_moe::device::ptx {

#define MEGA_MOE_LOAD(NAME, TYPE, LOAD, CONSTRAINT, ...)                               \
    __device__ __forceinline__ TYPE NAME(const TYPE* address) {                        \
        TYPE v;                                                                        \
        asm volatile(LOAD " %0, [%1];" : "=" CONSTRAINT(v) : "l"(address)__VA_ARGS__); \
        return v;                                                                      \
    }

MEGA_MOE_LOAD(load_acquire_sys, uint64_t, "ld.acquire.sys.global.u64", "l", : "memory")
MEGA_MOE_LOAD(load_acquire_gpu, uint64_t, "ld.acquire.gpu.global.u64", "l", : "memory")
MEGA_MOE_LOAD(load_acquire_gpu, uint32_t, "ld.acquire.gpu.global.u32", "r", : "memory")
MEGA_MOE_LOAD(load_relaxed_sys, uint64_t, "ld.relaxed.sys.global.u64", "l")
// The loads below are of data that a flag or barrier has announced in this launch: never through L1 or the
// constant path.
MEGA_MOE_LOAD(load_relaxed_gpu, uint32_t, "ld.relaxed.gpu.global.u32", "r")
MEGA_MOE_LOAD(load_relaxed_gpu, uint64_t, "ld.relaxed.gpu.global.u64", "l")
MEGA_MOE_LOAD(load_relaxed_gpu, float, "ld.relaxed.gpu.global.f32", "f")
MEGA_MOE_LOAD(load_relaxed_sys, float, "ld.relaxed.sys.global.f32", "f")
MEGA_MOE_LOAD(load_relaxed_sys, uint32_t, "ld.relaxed.sys.global.u32", "r")
MEGA_MOE_LOAD(load_relaxed_sys, uint16_t, "ld.relaxed.sys.global.u16", "h")

#undef MEGA_MOE_LOAD

__device__ __forceinline__ uint4 load_relaxed_gpu(const uint4* address) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ float2 load_relaxed_gpu(const float2* address) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
    return v;
}

__device__ __forceinline__ uint4 load_relaxed_sys(const uint4* address) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* address, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint64_t* address, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ void add_relaxed_gpu(uint32_t* address, uint32_t v) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void add_release_gpu(uint64_t* address, uint64_t v) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ void add_release_gpu(uint32_t* address, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// Four fp32 numbers, given by their bits.
__device__ __forceinline__ void add_relaxed_gpu(void* address, uint4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
                 "f"(__uint_as_float(v.w))
                 : "memory");
}

// The rest return what was there.
__device__ __forceinline__ uint32_t fetch_add_relaxed_gpu(uint32_t* address, uint32_t v) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(v)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint32_t fetch_add_acq_rel_gpu(uint32_t* address, uint32_t v) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(v)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint64_t max_relaxed_gpu(uint64_t* address, uint64_t v) {
    uint64_t old;
    asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(address), "l"(v)
                 : "memory");
    return old;
}

// Order what this thread, and threads that met it at a barrier, wrote before what it writes after.
__device__ __forceinline__ void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
__device__ __forceinline__ void fence_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

}  // namespace mega_moe::device::ptx
