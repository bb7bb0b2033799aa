#pragma once
#include <cstdint>

#include "device/ptx/wgmma_operands.cuh"

// d[64, N] += a[64, 16] b[N, 16]^T in bf16, fp32 accumulators; a and b are descriptors of operands in shared
// memory, which lie MN-major where the transposition is 1. The length of d says which N.
namespace mega_moe::device::ptx {

template <int TransposeA, int TransposeB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MEGA_MOE_WGMMA_NAMES_64
        "}, %64, %65, accumulate, 1, 1, %66, %67;\n}"
        : MEGA_MOE_WGMMA_LIST_64("+", d)
        : "l"(a), "l"(b), "n"(TransposeA), "n"(TransposeB));
}

template <int TransposeA, int TransposeB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MEGA_MOE_WGMMA_NAMES_128
        "}, %128, %129, accumulate, 1, 1, %130, %131;\n}"
        : MEGA_MOE_WGMMA_LIST_128("+", d)
        : "l"(a), "l"(b), "n"(TransposeA), "n"(TransposeB));
}

}  // namespace mega_moe::device::ptx
