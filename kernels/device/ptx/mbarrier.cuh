#pragma once
#include <cstdint>

// Barriers in shared memory, given by their shared address. A phase ends when all arrivals and all announced
// bytes are in; waits name the parity of the phase they wait for, 0 for the first.
namespace mega_moe::device::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and announces bytes that bulk copies will deliver.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives at the barrier at the same offset in block `rank` of the cluster. Without .release.cluster:
// spelled out, it compiles to MEMBAR.ALL.GPU, which halves the rate of a GEMM that releases its stages so.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

#define MEGA_MOE_PHASE_ENDED(NAME, WAIT)                                      \
    __device__ __forceinline__ bool NAME(uint32_t barrier, uint32_t parity) { \
        uint32_t ended;                                                       \
        asm volatile("{\n.reg .pred p;\n" WAIT                                \
                     ".parity.shared::cta.b64 p, [%1], %2;\n"                 \
                     "selp.b32 %0, 1, 0, p;\n}"                               \
                     : "=r"(ended)                                            \
                     : "r"(barrier), "r"(parity)                              \
                     : "memory");                                             \
        return ended != 0;                                                    \
    }

// True if the phase has ended.
MEGA_MOE_PHASE_ENDED(mbarrier_test, "mbarrier.test_wait")
// True once the phase has ended; may suspend the thread for a while first.
MEGA_MOE_PHASE_ENDED(mbarrier_try_wait, "mbarrier.try_wait")

#undef MEGA_MOE_PHASE_ENDED

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

}  // namespace mega_moe::device::ptx
