#pragma once
#include "device/ptx/approximate.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/convert_bf16x2.cuh"

namespace mega_moe::device {

// silu(g) * u * w in fp32. exp overflows to Inf for g below -88, and g / Inf is the right -0.
__device__ __forceinline__ float weighted_swiglu(float g, float u, float w) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float sigmoid = ptx::reciprocal_approximate(1.0f + ptx::exp2_approximate(g * -kLog2E));
    return g * sigmoid * u * w;
}

// The activation of a tile of 64 rows x [128 gate | 128 up] in the registers of wgmma, in place of the gate half.
// Both halves are rounded to bf16 first, so that a backward that recomputes them gets the same. `w` are the
// routing weights of the thread's rows, lane / 4 and + 8.
__device__ __forceinline__ void swiglu_tile(float (&d)[128], const float (&w)[2], float clamp) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const std::uint32_t gate = ptx::convert_bf16x2(d[i], d[i + 1]);
        const std::uint32_t up = ptx::convert_bf16x2(d[64 + i], d[64 + i + 1]);
        const float weight = w[i / 2 % 2];
        const auto activate = [&](float g, float u) {
            // Written as comparisons so that a NaN stays one.
            g = g > clamp ? clamp : g;
            u = u > clamp ? clamp : u < -clamp ? -clamp : u;
            return weighted_swiglu(g, u, weight);
        };
        d[i] = activate(ptx::low_bf16(gate), ptx::low_bf16(up));
        d[i + 1] = activate(ptx::high_bf16(gate), ptx::high_bf16(up));
    }
}

}  // namespace mega_moe::device
