#pragma once
#include <cstdint>

#include "device/sm90/epilogue/swiglu.cuh"

namespace mega_moe::device::sm90 {

// The backward of h = round(silu(g) * u * w) for a warp's 16 rows x 64 features. `gate` and `up` hold pairs
// of neighbouring columns as bf16, in wgmma's order, so that even words are of row lane / 4 and odd ones of
// row + 8. `dh` is the gradient of h, and `dw` gets what the features add to the gradient of the row's
// routing weight w. `sink(first, dg, du, h)` takes four elements at a time, from `first` on.
template <bool Clamped, class Sink>
__device__ __forceinline__ void swiglu_backward(const std::uint32_t* gate, const std::uint32_t* up,
                                                const float* dh, const float (&w)[2], float clamp,
                                                float (&dw)[2], const Sink& sink) {
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int first = 0; first < 32; first += kAtOnce) {
        float g[kAtOnce], u[kAtOnce], share[kAtOnce], dg[kAtOnce], du[kAtOnce], h[kAtOnce];
        bool gate_inside[kAtOnce], up_inside[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
            g[i] = ptx::low_bf16(gate[(first + i) / 2]);
            g[i + 1] = ptx::high_bf16(gate[(first + i) / 2]);
            u[i] = ptx::low_bf16(up[(first + i) / 2]);
            u[i + 1] = ptx::high_bf16(up[(first + i) / 2]);
        }
        // Comparisons, so that a NaN stays one.
#pragma unroll
        for (int i = 0; Clamped && i < kAtOnce; ++i) {
            gate_inside[i] = !(g[i] > clamp);
            up_inside[i] = !(u[i] > clamp) && !(u[i] < -clamp);
            g[i] = gate_inside[i] ? g[i] : clamp;
            u[i] = up_inside[i] ? u[i] : u[i] > clamp ? clamp : -clamp;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            share[i] = ptx::exp2_approximate(g[i] * -kLog2E);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            share[i] = ptx::reciprocal_approximate(1.0f + share[i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = i / 2 % 2;
            const float d = dh[first + i];
            const float silu = g[i] * share[i];
            const float a = silu * u[i];
            dw[row] += d * a;
            h[i] = a * w[row];
            const float da = d * w[row];
            dg[i] = da * u[i] * (share[i] * (1.0f + g[i] * (1.0f - share[i])));
            du[i] = da * silu;
            if (Clamped && !gate_inside[i]) dg[i] = 0.0f;
            if (Clamped && !up_inside[i]) du[i] = 0.0f;
        }
        sink(first, dg, du, h);
    }
}

// In place of gate and up their gradients, and `h_words` anew, all in bf16. `mask` is all ones for a row that
// counts, else 0: what lies beyond the last row becomes zero, since sums over rows read it.
template <bool Clamped>
__device__ __forceinline__ void swiglu_backward_block(std::uint32_t* gate, std::uint32_t* up,
                                                      std::uint32_t* h_words, const float* dh,
                                                      const float (&w)[2], const std::uint32_t (&mask)[2],
                                                      float clamp, float (&dw)[2]) {
    swiglu_backward<Clamped>(gate, up, dh, w, clamp, dw,
                             [&](int first, const float* dg, const float* du, const float* h) {
#pragma unroll
                                 for (int i = 0; i < 4; i += 2) {
                                     const int word = (first + i) / 2;
                                     gate[word] = ptx::convert_bf16x2(dg[i], dg[i + 1]) & mask[word % 2];
                                     up[word] = ptx::convert_bf16x2(du[i], du[i + 1]) & mask[word % 2];
                                     h_words[word] = ptx::convert_bf16x2(h[i], h[i + 1]) & mask[word % 2];
                                 }
                             });
}

// The same, with the gradients as fp32: of gate in place of `dh`, of up in `du`.
template <bool Clamped>
__device__ __forceinline__ void swiglu_backward_wide(const std::uint32_t* gate, const std::uint32_t* up,
                                                     std::uint32_t* h_words, float* dh, float* du_out,
                                                     const float (&w)[2], const std::uint32_t (&mask)[2],
                                                     float clamp, float (&dw)[2]) {
    swiglu_backward<Clamped>(gate, up, dh, w, clamp, dw,
                             [&](int first, const float* dg, const float* du, const float* h) {
#pragma unroll
                                 for (int i = 0; i < 4; i += 2) {
                                     const int word = (first + i) / 2;
                                     h_words[word] = ptx::convert_bf16x2(h[i], h[i + 1]) & mask[word % 2];
                                 }
#pragma unroll
                                 for (int i = 0; i < 4; ++i) {
                                     dh[first + i] = dg[i];
                                     du_out[first + i] = du[i];
                                 }
                             });
}

}  // namespace mega_moe::device::sm90
