#pragma once
#include <cstdint>

#include "device/base/group_scale.cuh"
#include "device/kernel/stage_params.h"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/global_memory.cuh"
#include "layout/staging.h"

namespace mega_moe::device {

// A 16-byte vector holds 8 elements, so 16 lanes hold a group and a warp's load is two groups.
inline constexpr int kLanesPerGroup = layout::kQuantGroup / 8;

// Largest magnitude over the vector, per half of the register.
__device__ __forceinline__ uint32_t amax_of_vector(uint4 v) {
    return ptx::max_nan_bf16x2(ptx::max_nan_bf16x2(ptx::abs_bf16x2(v.x), ptx::abs_bf16x2(v.y)),
                               ptx::max_nan_bf16x2(ptx::abs_bf16x2(v.z), ptx::abs_bf16x2(v.w)));
}

// The amax of the groups of two vectors, `a`'s in the low half; every lane of a group gets it. bf16 holds it
// exactly, so two reductions share each shuffle.
__device__ __forceinline__ uint32_t amax_of_groups(uint4 a, uint4 b) {
    const uint32_t of_a = amax_of_vector(a);
    const uint32_t of_b = amax_of_vector(b);
    uint32_t amax = ptx::max_nan_bf16x2(ptx::pack_low_halves(of_a, of_b), ptx::pack_high_halves(of_a, of_b));
#pragma unroll
    for (int distance = kLanesPerGroup / 2; distance > 0; distance /= 2)
        amax = ptx::max_nan_bf16x2(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    return amax;
}

// Four elements to e4m3, the lowest address in the low byte.
__device__ __forceinline__ uint32_t quantise_words(uint32_t low, uint32_t high, const GroupScale& g) {
    float x[4] = {ptx::low_bf16(low), ptx::high_bf16(low), ptx::low_bf16(high), ptx::high_bf16(high)};
    if (g.lift != 1.0f) {
#pragma unroll
        for (float& element : x)
            element *= g.lift;
    }
#pragma unroll
    for (float& element : x)
        element = divide_by_scale(element, g);
    return ptx::convert_e4m3x4(x[0], x[1], x[2], x[3]);
}

// Quantises one tile: each warp takes kVectors consecutive loads of 512 bytes.
template <class Config>
__device__ __forceinline__ void stage_quantise(const StageParams& p, uint32_t tile) {
    static_assert(Config::kVectors % 2 == 0, "vectors are handled in pairs");
    static_assert(Config::kVectors <= kLanesPerGroup, "a lane of each group stores the scale of one vector");
    constexpr int kWarps = Config::kThreads / 32;
    constexpr int kGroups = Config::kVectors * 2;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int lane_in_group = lane % kLanesPerGroup;
    const int half = lane / kLanesPerGroup;
    const int64_t first_group = (int64_t{tile} * kWarps + threadIdx.x / 32) * kGroups;
    const int64_t groups_left = p.num_vectors / kLanesPerGroup - first_group;

    const uint4* source = static_cast<const uint4*>(p.x) + first_group * kLanesPerGroup + lane;
    uint4 v[Config::kVectors];
#pragma unroll
    for (int i = 0; i < Config::kVectors; ++i)
        v[i] = 2 * i + half < groups_left ? ptx::load_stream(source + i * 32) : uint4{0, 0, 0, 0};

    // Lanes 2n and 2n+1 hold 8 codes each of both vectors of a pair. They swap, so that the even lane stores
    // 16 codes of the first vector and the odd lane 16 of the second.
    const bool odd = lane % 2 != 0;
    uint4* target =
        static_cast<uint4*>(p.staged_x) + first_group * (kLanesPerGroup / 2) + lane / 2 + (odd ? 16 : 0);
    float scale = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kVectors; i += 2) {
        const uint32_t amax = amax_of_groups(v[i], v[i + 1]);
        const GroupScale a = make_group_scale(ptx::low_bf16(amax));
        const GroupScale b = make_group_scale(ptx::high_bf16(amax));
        const uint2 codes_a = {quantise_words(v[i].x, v[i].y, a), quantise_words(v[i].z, v[i].w, a)};
        const uint2 codes_b = {quantise_words(v[i + 1].x, v[i + 1].y, b),
                               quantise_words(v[i + 1].z, v[i + 1].w, b)};
        const uint2 sent = odd ? codes_a : codes_b;
        const uint2 got = {__shfl_xor_sync(0xFFFFFFFFu, sent.x, 1), __shfl_xor_sync(0xFFFFFFFFu, sent.y, 1)};
        const uint4 codes =
            odd ? uint4{got.x, got.y, codes_b.x, codes_b.y} : uint4{codes_a.x, codes_a.y, got.x, got.y};
        if (2 * (i + odd) + half < groups_left) ptx::store(target + i * 16, codes);
        if (lane_in_group == i) scale = a.scale;
        if (lane_in_group == i + 1) scale = b.scale;
    }
    const int my_group = 2 * lane_in_group + half;
    if (lane_in_group < Config::kVectors && my_group < groups_left)
        p.staged_sf[first_group + my_group] = scale;
}

}  // namespace mega_moe::device
