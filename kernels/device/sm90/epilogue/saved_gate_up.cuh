#pragma once
#include <cstddef>
#include <cstdint>

#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "layout/saved_gate_up.h"

// Gate and up of a warp's 16 rows x 128 features, in the registers of wgmma, to the memory between forward
// and backward and back. `at` is the lane's first vector.
namespace mega_moe::device::sm90 {

// `d` is [64 gate | 64 up], rounded as both directions round it.
__device__ __forceinline__ void save_gate_up(const float (&d)[128], std::byte* at) {
#pragma unroll
    for (int i = 0; i < layout::kSavedVectors; ++i) {
        const float* e = d + 8 * i;
        ptx::store(at + i * layout::kSavedVectorBytes,
                   {ptx::convert_bf16x2(e[0], e[1]), ptx::convert_bf16x2(e[2], e[3]),
                    ptx::convert_bf16x2(e[4], e[5]), ptx::convert_bf16x2(e[6], e[7])});
    }
}

// Into pairs of bf16; nothing waits for them here.
__device__ __forceinline__ void load_gate_up(const std::byte* at, std::uint32_t (&gate)[32],
                                             std::uint32_t (&up)[32]) {
#pragma unroll
    for (int i = 0; i < layout::kSavedVectors; ++i) {
        const uint4 v = ptx::load_stream(at + i * layout::kSavedVectorBytes);
        std::uint32_t* words = (i < layout::kSavedVectors / 2 ? gate : up) + i % 8 * 4;
        words[0] = v.x;
        words[1] = v.y;
        words[2] = v.z;
        words[3] = v.w;
    }
}

}  // namespace mega_moe::device::sm90
