#pragma once

namespace mega_moe::device::ptx {

// Orders this thread's ordinary accesses to shared memory before later ones by bulk copies and wgmma.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses to global memory likewise: between what a flag has announced and copies of it by the
// engine, and between ordinary stores and the flag that announces them to such a reader.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Shows initialized barriers to the cluster and to bulk copies; a block or cluster barrier must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_proxy_async_shared();
}

}  // namespace mega_moe::device::ptx
