#pragma once
#include "device/dispatch/stage_copy.cuh"
#include "device/dispatch/stage_slots.cuh"
#include "device/quantize/stage_quantize.cuh"
#include "layout/stage_params.h"

namespace mega_moe::device {

template <bool Quantize, int Threads, int Vectors, int BlocksPerSm>
struct StageConfig {
    static constexpr bool kQuantize = Quantize;
    static constexpr int kThreads = Threads;
    static constexpr int kVectors = Vectors;
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static_assert(kThreads % 32 == 0 && kThreads * kBlocksPerSm <= 2048, "threads of an SM");
    // 4.3 TB/s over 132 SMs times about 0.8 us of latency is 26 kB; reads are half of it in the copying form.
    static_assert(kThreads * kVectors * 16 * kBlocksPerSm >= 26 * 1024, "bytes in flight per SM");
};

// The first blocks take ids and weights, so that these small accesses overlap the stream of x; the rest take
// x.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) sm90_stage(
    const __grid_constant__ layout::StageParams p) {
    if (blockIdx.x < p.num_slot_blocks) {
        stage_slots<Config>(p, blockIdx.x);
    } else if constexpr (Config::kQuantize) {
        stage_quantize<Config>(p, blockIdx.x - p.num_slot_blocks);
    } else {
        stage_copy<Config>(p, blockIdx.x - p.num_slot_blocks);
    }
}

}  // namespace mega_moe::device
