#pragma once
#include "device/quantize/weights.cuh"
#include "layout/quantize_weights_params.h"
#include "layout/weight_block.h"

namespace mega_moe::device {

// One block of 128 x 128 elements for each CTA; while some wait for their loads or for one another, others
// store.
template <int Threads, int BlocksPerSm>
__global__ void __launch_bounds__(Threads, BlocksPerSm) sm90_quantize_weights(
    const __grid_constant__ layout::QuantizeWeightsParams p) {
    static_assert(Threads == layout::kPatchThreads, "a thread holds one patch");
    static_assert(Threads * BlocksPerSm <= 2048, "threads of an SM");
    // 4.3 TB/s over 132 SMs times about 0.8 us of latency is 26 kB, half of it reads; a CTA loads in a third
    // of its time.
    static_assert(BlocksPerSm * layout::kWeightBlock * layout::kWeightBlock * 2 >= 3 * 26 * 1024,
                  "bytes in flight per SM");
    __shared__ QuantizeWeightsShared shared;
    quantize_weight_block(p, blockIdx.x, shared);
}

}  // namespace mega_moe::device
