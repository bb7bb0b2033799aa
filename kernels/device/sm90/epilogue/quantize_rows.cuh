#pragma once
#include <cstdint>

#include "device/common/group_scale.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/max_nan.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "device/sm90/epilogue/store_rows.cuh"

namespace mega_moe::device::sm90 {

// Largest magnitudes of the thread's two rows of 128 columns, lane / 4 and + 8, over the four lanes that hold
// each. NaN where there is one.
__device__ __forceinline__ void amax_of_rows(const float* d, float (&amax)[2]) {
    amax[0] = amax[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        amax[i / 2 % 2] = ptx::max_abs_nan(amax[i / 2 % 2], d[i]);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
        for (int row = 0; row < 2; ++row)
            amax[row] = ptx::max_abs_nan(amax[row], __shfl_xor_sync(ptx::kAllLanes, amax[row], distance));
}

// One warp's 16 rows x 128 columns on their way to e4m3: the scale factors of the thread's two rows, each row
// times its weight, and what to multiply its elements by. `d` are the accumulators of those columns: rows
// lane / 4 and + 8, columns 8 i + 2 (lane % 4) and + 1. One product of each element with weight / scale may
// differ from weighting and dividing in the last bits of fp32, which is far less than the sums that the
// element was made of do.
struct RowFactors {
    float scale[2];
    float factor[2];
};

__device__ __forceinline__ RowFactors row_factors(float* d, const float (&weight)[2],
                                                  layout::ScaleRounding rounding) {
    float amax[2];
    amax_of_rows(d, amax);
    RowFactors f;
    bool lifted = false;
    float lift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const GroupScale own = make_group_scale(amax[i] * fabsf(weight[i]), rounding);
        f.scale[i] = own.scale;
        f.factor[i] = weight[i] * own.high;
        lift[i] = own.lift;
        lifted = lifted || own.lift != 1.0f;
    }
    if (ptx::any(lifted)) {
#pragma unroll
        for (int i = 0; i < 64; ++i)
            d[i] *= lift[i / 2 % 2];
    }
    return f;
}

// Codes to 2 KB of shared memory, in the 128-byte swizzle.
__device__ __forceinline__ void stage_codes(const float* d, const float (&factor)[2], std::uint32_t buffer,
                                            int lane) {
    const int in_warp = lane / 4;
    const std::uint32_t at = buffer + in_warp * 128 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
        // 16 bytes are two of the accumulators' blocks of 8 columns.
        const std::uint32_t to = (at ^ ((i / 8 ^ in_warp) << 4)) + i / 4 % 2 * 8;
        ptx::store_shared(to, ptx::convert_e4m3x2(d[i] * factor[0], d[i + 1] * factor[0]));
        ptx::store_shared(to + 1024, ptx::convert_e4m3x2(d[i + 2] * factor[1], d[i + 3] * factor[1]));
    }
}

// Codes by the map's box of 128 x 16 at (column, row), scale factors to 16 words at `scales`, through 64
// bytes of shared memory.
__device__ __forceinline__ void quantize_rows(float* d, const float (&weight)[2],
                                              layout::ScaleRounding rounding, const void* map,
                                              std::uint32_t buffer, std::uint32_t scale_buffer, int column,
                                              int row, std::byte* scales, int lane) {
    const RowFactors f = row_factors(d, weight, rounding);
    if (lane == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane % 4 == 0) {
        ptx::store_shared(scale_buffer + lane, f.scale[0]);
        ptx::store_shared(scale_buffer + lane + 32, f.scale[1]);
    }
    stage_codes(d, f.factor, buffer, lane);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
        ptx::tma_store(map, buffer, column, row);
        ptx::bulk_store(scales, scale_buffer, 64);
        ptx::bulk_commit();
    }
}

// Largest magnitude of each of four values over the four lanes of a row: that of value lane % 4. NaN where
// there is one.
__device__ __forceinline__ float amax_of_fours(const float (&v)[4], int lane) {
    const bool odd = lane % 2 != 0;
    const bool upper = lane / 2 % 2 != 0;
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        pair[i] = ptx::max_abs_nan(odd ? v[2 * i + 1] : v[2 * i],
                                   __shfl_xor_sync(ptx::kAllLanes, odd ? v[2 * i] : v[2 * i + 1], 1));
    return ptx::max_abs_nan(upper ? pair[1] : pair[0],
                            __shfl_xor_sync(ptx::kAllLanes, upper ? pair[0] : pair[1], 2));
}

// The thread's part of two groups of a row as quantize_rows takes them, without weights: the four lanes of a
// row find one scale factor each, of group lane / 2 % 2 and row lane / 4 + 8 (lane % 2), which is returned.
// Elements are lifted where their scale asks for that, and are to be multiplied by factor[group][row].
__device__ __forceinline__ float factors_of_two_groups(float (&first)[64], float (&second)[64],
                                                       float (&factor)[2][2], layout::ScaleRounding rounding,
                                                       int lane) {
    float amax[4] = {};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        amax[i / 2 % 2] = ptx::max_abs_nan(amax[i / 2 % 2], first[i]);
        amax[2 + i / 2 % 2] = ptx::max_abs_nan(amax[2 + i / 2 % 2], second[i]);
    }
    const GroupScale own = make_group_scale(amax_of_fours(amax, lane), rounding);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        factor[i / 2][i % 2] = __shfl_sync(ptx::kAllLanes, own.high, i, 4);
    if (ptx::any(own.lift != 1.0f)) {
        float lift[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            lift[i] = __shfl_sync(ptx::kAllLanes, own.lift, i, 4);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            first[i] *= lift[i / 2 % 2];
            second[i] *= lift[2 + i / 2 % 2];
        }
    }
    return own.scale;
}

}  // namespace mega_moe::device::sm90
