#pragma once
#include "device/ptx/approximate.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/convert_bf16x2.cuh"

namespace mega_moe::device::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// silu(g) * u * w in fp32 of a tile of 64 rows x [gate | up] in the registers of wgmma, in place of
// the gate half. Both halves are rounded to bf16 first, so that a backward that recomputes them gets the
// same. `w` are the routing weights of the thread's rows, lane / 4 and + 8, left out unless `Weighted`.
template <bool Clamped, bool Weighted = true, int Count>
__device__ __forceinline__ void swiglu_tile(float (&d)[Count], const float (&w)[2], float clamp) {
    // So many at a time, step by step, that the special function unit's latency is hidden.
    constexpr int kAtOnce = 8;
    constexpr int kUp = Count / 2;  // where the elements of up begin
#pragma unroll
    for (int first = 0; first < kUp; first += kAtOnce) {
        float g[kAtOnce];
        float u[kAtOnce];
        float sigmoid[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
            const std::uint32_t gate = ptx::convert_bf16x2(d[first + i], d[first + i + 1]);
            const std::uint32_t up = ptx::convert_bf16x2(d[kUp + first + i], d[kUp + first + i + 1]);
            g[i] = ptx::low_bf16(gate);
            g[i + 1] = ptx::high_bf16(gate);
            u[i] = ptx::low_bf16(up);
            u[i + 1] = ptx::high_bf16(up);
        }
        // Comparisons, so that a NaN stays one.
#pragma unroll
        for (int i = 0; Clamped && i < kAtOnce; ++i) {
            g[i] = g[i] > clamp ? clamp : g[i];
            u[i] = u[i] > clamp ? clamp : u[i] < -clamp ? -clamp : u[i];
        }
        // exp overflows to Inf for g below -88, and g / Inf is the right -0.
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            sigmoid[i] = ptx::exp2_approximate(g[i] * -kLog2E);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            sigmoid[i] = ptx::reciprocal_approximate(1.0f + sigmoid[i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            d[first + i] = Weighted ? g[i] * sigmoid[i] * u[i] * w[i / 2 % 2] : g[i] * sigmoid[i] * u[i];
    }
}

}  // namespace mega_moe::device::sm90
