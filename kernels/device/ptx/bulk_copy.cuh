#pragma once
#include <cstdint>

// Copies of contiguous bytes between global and shared memory by the copy engine. Addresses and sizes are
// multiples of 16. Global addresses may be a peer's.
namespace mega_moe::device::ptx {

// The bytes count towards `barrier`, where they must be announced.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// A bulk copy into every block of the cluster whose bit is set in `blocks`, as tma_multicast does.
__device__ __forceinline__ void bulk_multicast(uint32_t shared, const void* global, uint32_t bytes,
                                               uint32_t barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
}

// Stores since the last commit become one group of this thread.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the latest `Pending` groups have read their source, which may then be overwritten. Says
// nothing about the destination.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Until all but the latest `Pending` groups are written; what is published by a flag must be.
template <int Pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace mega_moe::device::ptx
