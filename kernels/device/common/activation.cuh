#pragma once
#include <cmath>

#include "device/ptx/approximate.cuh"
#include "mega_moe/activation.h"

// What lies between the two projections, element by element in fp32. One struct an activation:
//   forward(g, u, a)      a of `Count` elements of gate and up; changes g and u
//   backward(g, u, step)  calls step(i, a, gradients) for each element, where gradients(da, dg, du)
//                         sets dg and du, the gradients of gate and up, from da, that of a; changes g
//                         and u
// Several elements at a time, step by step, so that the latency of the special function unit is hidden.
namespace mega_moe::device {

// silu(min(g, clamp)) * clamp(u, -clamp, clamp). Without a clamp its five instructions of fifteen an element
// do nothing, so there is a form that has none.
template <bool Clamped>
struct Swiglu {
    float clamp;

    template <int Count, class Step>
    __device__ __forceinline__ void forward(float (&g)[Count], float (&u)[Count], const Step& step) const {
        float share[Count];
        // Comparisons, so that a NaN stays one.
#pragma unroll
        for (int i = 0; Clamped && i < Count; ++i) {
            g[i] = g[i] > clamp ? clamp : g[i];
            u[i] = u[i] > clamp ? clamp : u[i] < -clamp ? -clamp : u[i];
        }
        sigmoid(g, share);
#pragma unroll
        for (int i = 0; i < Count; ++i)
            step(i, g[i] * share[i] * u[i]);
    }

    template <int Count, class Step>
    __device__ __forceinline__ void backward(float (&g)[Count], float (&u)[Count], const Step& step) const {
        bool gate_inside[Count], up_inside[Count];
        float share[Count];
#pragma unroll
        for (int i = 0; Clamped && i < Count; ++i) {
            gate_inside[i] = !(g[i] > clamp);
            up_inside[i] = !(u[i] > clamp) && !(u[i] < -clamp);
            g[i] = gate_inside[i] ? g[i] : clamp;
            u[i] = up_inside[i] ? u[i] : u[i] > clamp ? clamp : -clamp;
        }
        sigmoid(g, share);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float silu = g[i] * share[i];
            step(i, silu * u[i], [&](float da, float& dg, float& du) {
                dg = da * u[i] * (share[i] * (1.0f + g[i] * (1.0f - share[i])));
                du = da * silu;
                if (Clamped && !gate_inside[i]) dg = 0.0f;
                if (Clamped && !up_inside[i]) du = 0.0f;
            });
        }
    }

  private:
    // exp overflows to Inf for g below -88, and g / Inf is the right -0.
    template <int Count>
    static __device__ __forceinline__ void sigmoid(const float (&g)[Count], float (&s)[Count]) {
        constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
        for (int i = 0; i < Count; ++i)
            s[i] = ptx::exp2_approximate(g[i] * -kLog2E);
#pragma unroll
        for (int i = 0; i < Count; ++i)
            s[i] = ptx::reciprocal_approximate(1.0f + s[i]);
    }
};

// run(activation), with the struct that the call means.
template <class Run>
__device__ __forceinline__ void with_activation(const Activation& a, const Run& run) {
    if (a.clamp < INFINITY)
        run(Swiglu<true>{a.clamp});
    else
        run(Swiglu<false>{a.clamp});
}

}  // namespace mega_moe::device
