#pragma once
#include <cstdint>

#include "device/common/e4m3_vector.cuh"
#include "device/common/group_scale.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "layout/scale_rounding.h"

namespace mega_moe::device {

// A 16-byte vector holds 8 elements, so 16 lanes hold a group of 128 and a warp's load is two groups.
inline constexpr int kLanesPerGroup = layout::kQuantGroup / 8;
// Vectors whose groups are reduced together. Each of the eight groups then has a lane of its own that finds
// its scale.
inline constexpr int kQuad = 4;
inline constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

// Lane, within the 16 lanes of a group, that holds the scale of vector i of a quad; its bits 3 and 0 are
// those of i.
__device__ constexpr int scale_lane(int i) {
    return (i & 2) * 4 + (i & 1);
}

// The amax of this lane's parts of the groups of two vectors, the first in the low half. bf16 holds it
// exactly, so two reductions share each shuffle.
__device__ __forceinline__ uint32_t amax_of_pair(uint4 a, uint4 b) {
    const uint32_t of_a = amax_of_vector(a);
    const uint32_t of_b = amax_of_vector(b);
    return ptx::max_abs_nan_bf16x2(ptx::pack_low_halves(of_a, of_b), ptx::pack_high_halves(of_a, of_b));
}

// The amax of the group whose scale this lane finds: of vector i for lane scale_lane(i); other lanes get one
// of these too.
__device__ __forceinline__ float amax_of_own_group(const uint4 (&v)[kQuad], int lane) {
    const uint32_t first = amax_of_pair(v[0], v[1]);
    const uint32_t second = amax_of_pair(v[2], v[3]);
    const bool upper = (lane & 8) != 0;
    uint32_t amax = ptx::max_abs_nan_bf16x2(upper ? second : first,
                                            __shfl_xor_sync(kWholeWarp, upper ? first : second, 8));
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
        amax = ptx::max_abs_nan_bf16x2(amax, __shfl_xor_sync(kWholeWarp, amax, distance));
    amax = ptx::abs_bf16x2(amax);
    return (lane & 1) != 0 ? ptx::high_bf16(amax) : ptx::low_bf16(amax);
}

// Lanes 2n and 2n+1 hold 8 codes each of both vectors of a pair. They swap, so that the even lane has 16
// codes of the first vector to store and the odd lane 16 of the second.
__device__ __forceinline__ uint4 swap_codes(uint2 first, uint2 second, bool odd) {
    const uint2 sent = odd ? first : second;
    const uint2 got = {__shfl_xor_sync(kWholeWarp, sent.x, 1), __shfl_xor_sync(kWholeWarp, sent.y, 1)};
    return odd ? uint4{got.x, got.y, second.x, second.y} : uint4{first.x, first.y, got.x, got.y};
}

// Eight groups, quantized.
struct QuantizedQuad {
    uint4 codes[kQuad / 2];  // 16 codes of vector 2 i in even lanes, of 2 i + 1 in odd ones
    float scale;             // of vector quad_vector(lane), in lanes that hold one
};

// The vector of whose group this lane holds the scale; -1: of none.
__device__ __forceinline__ int quad_vector(int lane) {
    return (lane & 6) == 0 ? (lane & 8) / 4 + (lane & 1) : -1;
}

// By one warp; `v` are consecutive loads of 512 bytes.
__device__ __forceinline__ QuantizedQuad quantize_quad(uint4 (&v)[kQuad], layout::ScaleRounding rounding,
                                                       int lane) {
    const GroupScale own = make_group_scale(amax_of_own_group(v, lane), rounding);
    if (__any_sync(kWholeWarp, own.lift != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
            const float lift = __shfl_sync(kWholeWarp, own.lift, scale_lane(i), kLanesPerGroup);
            v[i] = ptx::scale_bf16x8(v[i], lift);
        }
    }
    QuantizedQuad quad;
    quad.scale = own.scale;
#pragma unroll
    for (int i = 0; i < kQuad; i += 2) {
        uint2 codes[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            codes[j] = quantize_vector(v[i + j],
                                       __shfl_sync(kWholeWarp, own.high, scale_lane(i + j), kLanesPerGroup),
                                       __shfl_sync(kWholeWarp, own.low, scale_lane(i + j), kLanesPerGroup));
        quad.codes[i / 2] = swap_codes(codes[0], codes[1], (lane & 1) != 0);
    }
    return quad;
}

// Rows to quantize, each of whole groups, and where they go.
struct QuantizedRows {
    const void* x;  // bf16
    void* codes;    // e4m3
    float* scales;  // one per group
    uint32_t num_groups;
    layout::ScaleRounding rounding;
};

inline constexpr uint32_t kGroupsPerWarp = 2 * kQuad;

// Groups from `first_group` on that are there for this half of the warp, which has every second one.
__device__ __forceinline__ int groups_of_half(const QuantizedRows& rows, uint32_t first_group) {
    if (first_group >= rows.num_groups) return 0;
    const auto half = static_cast<int>(threadIdx.x % 32) / kLanesPerGroup;
    return static_cast<int>(min(rows.num_groups - first_group, kGroupsPerWarp)) - half;
}

// One warp: loads the groups from `first_group` on, in kQuad consecutive loads of 512 bytes, which are 8
// groups.
__device__ __forceinline__ void load_groups(const QuantizedRows& rows, uint32_t first_group,
                                            uint4 (&v)[kQuad]) {
    const int groups_left = groups_of_half(rows, first_group);
    const uint4* source =
        static_cast<const uint4*>(rows.x) + size_t{first_group} * kLanesPerGroup + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
        v[i] = 2 * i < groups_left ? ptx::load_stream(source + i * 32) : uint4{0, 0, 0, 0};
}

// One warp: quantizes what load_groups has loaded.
__device__ __forceinline__ void quantize_groups(const QuantizedRows& rows, uint32_t first_group,
                                                uint4 (&v)[kQuad]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int half = lane / kLanesPerGroup;
    const int groups_left = groups_of_half(rows, first_group);
    const QuantizedQuad quad = quantize_quad(v, rows.rounding, lane);
    const int own = quad_vector(lane);
    if (own >= 0 && 2 * own < groups_left) rows.scales[first_group + 2 * own + half] = quad.scale;
    const int odd = lane & 1;
    uint4* target = static_cast<uint4*>(rows.codes) + size_t{first_group} * (layout::kQuantGroup / 16) +
                    lane / 2 + 16 * odd;
#pragma unroll
    for (int i = 0; i < kQuad; i += 2)
        if (2 * (i + odd) < groups_left) ptx::store(target + i * 16, quad.codes[i / 2]);
}

}  // namespace mega_moe::device
