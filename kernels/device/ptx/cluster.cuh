#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Writes a word at the same offset in block `rank` of the cluster; a cluster_sync shows it.
__device__ __forceinline__ void store_shared_at(uint32_t shared, uint32_t rank, uint32_t v) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.u32 [remote], %2;\n}" ::"r"(shared),
        "r"(rank), "r"(v)
        : "memory");
}

}  // namespace mega_moe::device::ptx
