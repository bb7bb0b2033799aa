#pragma once
#include <cstdint>

// What surrounds the MMAs of a warpgroup; all its threads execute it. The MMAs themselves are in
// wgmma_bf16.cuh and wgmma_e4m3.cuh.
namespace mega_moe::device::ptx {

// 0, which the compiler does not know.
__device__ __forceinline__ uint32_t opaque_zero() {
    uint32_t zero;
    asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    return zero;
}

// Before the first MMA after the accumulators were touched.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all but the latest `Pending` groups are done; their operands may then be overwritten, and with none
// pending the accumulators be read.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

}  // namespace mega_moe::device::ptx
