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

// Writes a word at the same offset in block `rank` of the cluster, and counts its 4 bytes towards the barrier
// at the same offset there, where they must be announced.
__device__ __forceinline__ void send_shared_at(uint32_t shared, uint32_t barrier, uint32_t rank, uint32_t v) {
    asm volatile(
        "{\n.reg .b32 to, there;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %3, [there];\n}" ::"r"(shared),
        "r"(barrier), "r"(rank), "r"(v)
        : "memory");
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
