#pragma once
#include <cstdint>

#include "device/ptx/wgmma_operands.cuh"

// d[64, N] += a[64, 32] b[N, 32]^T in e4m3, fp32 accumulators of about 14 bits' precision; a and b are
// descriptors of K-major operands in shared memory. The length of d says which N.
namespace mega_moe::device::ptx {

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MEGA_MOE_WGMMA_NAMES_64
        "}, %64, %65, accumulate, 1, 1;\n}"
        : MEGA_MOE_WGMMA_LIST_64("+", d)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_e4m3(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" MEGA_MOE_WGMMA_NAMES_128
        "}, %128, %129, accumulate, 1, 1;\n}"
        : MEGA_MOE_WGMMA_LIST_128("+", d)
        : "l"(a), "l"(b));
}

// Sets d instead of adding to it. As pure outputs the accumulators need no zeros and are dead before; zeroed
// temporaries in a loop make ptxas serialize the MMAs and spill.
__device__ __forceinline__ void wgmma_e4m3_first(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MEGA_MOE_WGMMA_NAMES_64
        "}, %64, %65, accumulate, 1, 1;\n}"
        : MEGA_MOE_WGMMA_LIST_64("=", d)
        : "l"(a), "l"(b));
}

// With 64 columns, of descriptors whose high words are `High`, by their low words: no registers for what is
// the same in all of them. Adds to d unless `accumulate`, which the compiler must not take for a constant, is
// 0: then it sets d. Unlike pure outputs, the accumulators stay the registers that they were, so that what
// still reads them comes before the MMA.
template <uint32_t High>
__device__ __forceinline__ void wgmma_e4m3_if(float (&d)[32], uint32_t a, uint32_t b, uint32_t accumulate) {
    asm volatile(
        "{\n.reg .pred accumulates;\n.reg .b64 rows, columns;\nsetp.ne.b32 accumulates, %34, 0;\n"
        "mov.b64 rows, {%32, %35};\nmov.b64 columns, {%33, %35};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" MEGA_MOE_WGMMA_NAMES_32
        "}, rows, columns, accumulates, 1, 1;\n}"
        : MEGA_MOE_WGMMA_LIST_32("+", d)
        : "r"(a), "r"(b), "r"(accumulate), "n"(High));
}

template <uint32_t High>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\n.reg .b64 rows, columns;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "mov.b64 rows, {%32, %34};\nmov.b64 columns, {%33, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" MEGA_MOE_WGMMA_NAMES_32
        "}, rows, columns, accumulate, 1, 1;\n}"
        : MEGA_MOE_WGMMA_LIST_32("+", d)
        : "r"(a), "r"(b), "n"(High));
}

}  // namespace mega_moe::device::ptx
