#pragma once
#include <cstdint>

// Operations of a whole warp: all 32 lanes take part.
namespace mega_moe::device::ptx {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ uint32_t lane_id() {
    return threadIdx.x % 32;
}

__device__ __forceinline__ uint32_t ballot(bool predicate) {
    return __ballot_sync(kAllLanes, predicate);
}

// The lane, recomputed here together with what follows from it: the compiler keeps addresses that follow from
// lane_id() from tile to tile, and where registers are short it keeps them in memory.
__device__ __forceinline__ uint32_t lane_id_anew() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ bool any(bool predicate) {
    return __any_sync(kAllLanes, predicate) != 0;
}

__device__ __forceinline__ uint32_t sum(uint32_t v) {
    return __reduce_add_sync(kAllLanes, v);
}

__device__ __forceinline__ uint32_t largest(uint32_t v) {
    return __reduce_max_sync(kAllLanes, v);
}

__device__ __forceinline__ uint32_t from_lane(uint32_t v, int lane) {
    return __shfl_sync(kAllLanes, v, lane);
}

// Sum over the lanes up to this one.
__device__ __forceinline__ uint32_t inclusive_sum(uint32_t v) {
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, v, distance);
        if (lane_id() >= distance) v += other;
    }
    return v;
}

__device__ __forceinline__ uint32_t lower_lanes() {
    return (1u << lane_id()) - 1;
}

}  // namespace mega_moe::device::ptx
