#pragma once
#include <cstdint>

// Copies of single words from global to shared memory that no register waits for.
namespace mega_moe::device::ptx {

// 4 bytes of memory that no one writes during the launch.
__device__ __forceinline__ void copy_word_async(uint32_t shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Arrives at `barrier`, as one of the arrivals that it counts, once this thread's copies so far are done.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace mega_moe::device::ptx
