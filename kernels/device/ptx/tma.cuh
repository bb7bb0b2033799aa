#pragma once
#include <cstdint>

// Copies of boxes of tensors, described by a 128-byte tensor map in kernel parameters or global memory.
// Coordinates are in elements, innermost first.
namespace mega_moe::device::ptx {

// The bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1,
                                         int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// Into the same offset of every block of the cluster whose bit is set in `blocks`; the bytes count towards
// the barrier at the same offset of each. All of them must have released the destination.
__device__ __forceinline__ void tma_multicast(uint32_t shared, const void* map, uint32_t barrier,
                                              uint16_t blocks, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared),
        "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_multicast(uint32_t shared, const void* map, uint32_t barrier,
                                              uint16_t blocks, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared),
        "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// Belongs to the bulk groups of this thread (bulk_copy.cuh).
__device__ __forceinline__ void tma_store(const void* map, uint32_t shared, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared), "r"(c0), "r"(c1)
                 : "memory");
}

}  // namespace mega_moe::device::ptx
