#pragma once
#include <cstdint>

#include "device/ptx/global_memory.cuh"
#include "layout/stage_params.h"

namespace mega_moe::device {

// Copies one tile of kThreads * kVectors 16-byte vectors of x.
template <class Config>
__device__ __forceinline__ void stage_copy(const layout::StageParams& p, uint32_t tile) {
    constexpr int kTile = Config::kThreads * Config::kVectors;
    const int64_t first = int64_t{tile} * kTile;
    const uint4* source = static_cast<const uint4*>(p.x) + first + threadIdx.x;
    uint4* target = static_cast<uint4*>(p.staged_x) + first + threadIdx.x;
    const int64_t left = p.num_vectors - first - threadIdx.x;
    uint4 v[Config::kVectors];
#pragma unroll
    for (int i = 0; i < Config::kVectors; ++i)
        if (i * Config::kThreads < left) v[i] = ptx::load_stream(source + i * Config::kThreads);
#pragma unroll
    for (int i = 0; i < Config::kVectors; ++i)
        if (i * Config::kThreads < left) ptx::store(target + i * Config::kThreads, v[i]);
}

}  // namespace mega_moe::device
