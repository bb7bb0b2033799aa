#pragma once
#include <cstdint>

#include "device/common/activation.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/convert_bf16x2.cuh"

// An activation on the accumulators of wgmma.
namespace mega_moe::device::sm90 {

// h in fp32 of a tile of 64 rows x [gate | up], in place of the gate half. Both halves are rounded to bf16
// first, so that a backward that recomputes them gets the same. `w` are the routing weights of the thread's
// rows, lane / 4 and
// + 8, left out unless `Weighted`.
template <bool Weighted, class Act, int Count>
__device__ __forceinline__ void activate_tile(const Act& act, float (&d)[Count], const float (&w)[2]) {
    constexpr int kAtOnce = 8;
    constexpr int kUp = Count / 2;  // where the elements of up begin
#pragma unroll
    for (int first = 0; first < kUp; first += kAtOnce) {
        float g[kAtOnce], u[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
            const std::uint32_t gate = ptx::convert_bf16x2(d[first + i], d[first + i + 1]);
            const std::uint32_t up = ptx::convert_bf16x2(d[kUp + first + i], d[kUp + first + i + 1]);
            g[i] = ptx::low_bf16(gate);
            g[i + 1] = ptx::high_bf16(gate);
            u[i] = ptx::low_bf16(up);
            u[i + 1] = ptx::high_bf16(up);
        }
        act.forward(g, u, [&](int i, float a) { d[first + i] = Weighted ? a * w[i / 2 % 2] : a; });
    }
}

// The backward of h = round(activation * w) for a warp's 16 rows x 64 features. `gate` and `up` hold pairs of
// neighboring columns as bf16, in wgmma's order, so that even words are of row lane / 4 and odd ones of row
// + 8. `dh` is the gradient of h, and `dw` gets what the features add to the gradient of the row's routing
// weight w. `sink(first, dg, du, h)` takes four elements at a time, from `first` on.
template <class Act, class Sink>
__device__ __forceinline__ void activation_backward(const Act& act, const std::uint32_t* gate,
                                                    const std::uint32_t* up, const float* dh,
                                                    const float (&w)[2], float (&dw)[2], const Sink& sink) {
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int first = 0; first < 32; first += kAtOnce) {
        float g[kAtOnce], u[kAtOnce], dg[kAtOnce], du[kAtOnce], h[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
            g[i] = ptx::low_bf16(gate[(first + i) / 2]);
            g[i + 1] = ptx::high_bf16(gate[(first + i) / 2]);
            u[i] = ptx::low_bf16(up[(first + i) / 2]);
            u[i + 1] = ptx::high_bf16(up[(first + i) / 2]);
        }
        act.backward(g, u, [&](int i, float a, const auto& gradients) {
            const int row = i / 2 % 2;
            const float d = dh[first + i];
            dw[row] += d * a;
            h[i] = a * w[row];
            gradients(d * w[row], dg[i], du[i]);
        });
        sink(first, dg, du, h);
    }
}

// Replaces gate and up by their gradients and recomputes `h_words`, all in bf16. `mask` is all ones for a row
// that counts, else 0: what lies beyond the last row becomes zero, since sums over rows read it.
template <class Act>
__device__ __forceinline__ void activation_backward_bf16(const Act& act, std::uint32_t* gate,
                                                         std::uint32_t* up, std::uint32_t* h_words,
                                                         const float* dh, const float (&w)[2],
                                                         const std::uint32_t (&mask)[2], float (&dw)[2]) {
    activation_backward(act, gate, up, dh, w, dw,
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

// The gradients as fp32: of gate in place of `dh`, of up in `du`. `h_words` and `mask` as above.
template <class Act>
__device__ __forceinline__ void activation_backward_fp32(const Act& act, const std::uint32_t* gate,
                                                         const std::uint32_t* up, std::uint32_t* h_words,
                                                         float* dh, float* du_out, const float (&w)[2],
                                                         const std::uint32_t (&mask)[2], float (&dw)[2]) {
    activation_backward(act, gate, up, dh, w, dw,
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
