#pragma once
#include <cstdint>

#include "device/common/group_scale.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/max_nan.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/warp.cuh"
#include "layout/gradient_operands.h"

// One warp's 16 rows x 128 columns on their way to a slab of e4m3. A thread holds columns 8 i + 2 (lane % 4)
// and + 1, of i from 0 to 15, of rows lane / 4 and + 8.
//   Values: float operator()(int i, int row, int column), row and column 0 or 1
namespace mega_moe::device::sm90 {

struct FloatValues {
    const float* d;
    __device__ __forceinline__ float operator()(int i, int row, int column) const {
        return d[4 * i + 2 * row + column];
    }
};
// Pairs of columns as bf16: even words are of the first row, odd ones of the second.
struct WordValues {
    const std::uint32_t* words;
    __device__ __forceinline__ float operator()(int i, int row, int column) const {
        const std::uint32_t word = words[2 * i + row];
        return column == 0 ? ptx::low_bf16(word) : ptx::high_bf16(word);
    }
};

// Largest magnitudes of each column over the warp's rows, to 128 numbers in shared memory; NaN where there is
// one. Lanes of one column give each other the half that they do not go on with, so that 28 exchanges do.
template <class Values>
__device__ __forceinline__ void store_column_maxima(const Values& v, std::uint32_t to, int lane) {
    float m[16];
    const auto of_column = [&](int at) {
        return ptx::max_abs_nan(v(at / 2, 0, at % 2), v(at / 2, 1, at % 2));
    };
    const auto pass_on = [&](bool upper, float low, float high, int distance) {
        return ptx::max_abs_nan(upper ? high : low,
                                __shfl_xor_sync(ptx::kAllLanes, upper ? low : high, distance));
    };
#pragma unroll
    for (int i = 0; i < 16; ++i)
        m[i] = pass_on((lane & 16) != 0, of_column(i), of_column(i + 16), 16);
    // Loops of their own: one with a bound that halves is not unrolled, and `m` then lies in memory.
#pragma unroll
    for (int i = 0; i < 8; ++i)
        m[i] = pass_on((lane & 8) != 0, m[i], m[i + 8], 8);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        m[i] = pass_on((lane & 4) != 0, m[i], m[i + 4], 4);
    const std::uint32_t at = to + (lane / 4 * 16 + lane % 4 * 2) * 4;
    ptx::store_shared(at, float2{m[0], m[1]});
    ptx::store_shared(at + 32, float2{m[2], m[3]});
}

// Largest magnitude in all of the warp's words.
__device__ __forceinline__ float largest_of_words(const std::uint32_t (&words)[32]) {
    std::uint32_t amax = words[0];
#pragma unroll
    for (int i = 1; i < 32; ++i)
        amax = ptx::max_abs_nan_bf16x2(amax, words[i]);
    amax = ptx::abs_bf16x2(amax);
    // As integers they have the order of the numbers, NaN above all.
    return __uint_as_float(ptx::largest(max(amax << 16, amax & 0xFFFF0000u)));
}

// Codes to 2 KB of shared memory. A word is two columns of both rows, two 16-bit elements that stmatrix
// turns.
//   Factors: float2 operator()(int i), what the thread's two columns are to be multiplied by
template <class Values, class Factors>
__device__ __forceinline__ void stage_slab(const Values& v, const Factors& factors, std::uint32_t buffer,
                                           int lane) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 f = factors(i + j);
            words[j] = ptx::convert_e4m3x4(v(i + j, 0, 0) * f.x, v(i + j, 1, 0) * f.x, v(i + j, 0, 1) * f.y,
                                           v(i + j, 1, 1) * f.y);
        }
        ptx::stmatrix_x4_transposed(buffer + (8 * i + lane) * layout::kSlabRows, words);
    }
}

// By one warp: what `stage` leaves in its buffer, by ordinary stores of whole lines. Signal it after
// __syncwarp only.
template <class Stage>
__device__ __forceinline__ void store_slab(const Stage& stage, std::byte* slab, std::uint32_t buffer,
                                           int lane) {
    __syncwarp();
    stage();
    __syncwarp();
    constexpr int kVectors = layout::kSlabBytes / 512;
    uint4 v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
        v[i] = ptx::load_shared_vector(buffer + i * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
        ptx::store(slab + i * 512 + lane * 16, v[i]);
}

// Zeros, of rows that no one has.
__device__ __forceinline__ void store_zero_slab(std::byte* slab, int lane) {
#pragma unroll
    for (int i = 0; i < layout::kSlabBytes / 512; ++i)
        ptx::store(slab + i * 512 + lane * 16, uint4{0, 0, 0, 0});
}

}  // namespace mega_moe::device::sm90
