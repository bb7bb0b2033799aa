#pragma once
#include <cstdint>

#include "layout/stage_params.h"
#include "layout/staging.h"

namespace mega_moe::device {

// The first bad id since the reader cleared the record stays in it; later ones are dropped.
__device__ __forceinline__ void record_bad_id(const layout::StageParams& p, uint32_t slot, int64_t id) {
    if (atomicCAS(p.error, 0, 1) != 0) return;
    p.error[1] = static_cast<int32_t>(slot / p.top_k);
    p.error[2] = static_cast<int32_t>(slot % p.top_k);
    p.error[3] = static_cast<int32_t>(max(min(id, int64_t{INT32_MAX}), int64_t{INT32_MIN}));
}

// Narrows expert ids to 16 bits and widens routing weights to fp32. Neither has a promised alignment beyond
// its element, hence no vector accesses; both together are about 2 % of the bytes of x.
template <class Config>
__device__ __forceinline__ void stage_slots(const layout::StageParams& p, uint32_t block) {
    const uint32_t first = block * (Config::kThreads * layout::kSlotsPerThread) + threadIdx.x;
    int64_t id[layout::kSlotsPerThread];
    float weight[layout::kSlotsPerThread];
#pragma unroll
    for (unsigned i = 0; i < layout::kSlotsPerThread; ++i) {
        const uint32_t slot = first + i * Config::kThreads;
        if (slot >= p.num_slots) continue;
        id[i] = p.idx_is_64_bit ? static_cast<const int64_t*>(p.topk_idx)[slot]
                                : static_cast<const int32_t*>(p.topk_idx)[slot];
        weight[i] = p.weights_are_bf16
                        ? __uint_as_float(uint32_t{static_cast<const uint16_t*>(p.topk_weights)[slot]} << 16)
                        : static_cast<const float*>(p.topk_weights)[slot];
    }
#pragma unroll
    for (unsigned i = 0; i < layout::kSlotsPerThread; ++i) {
        const uint32_t slot = first + i * Config::kThreads;
        if (slot >= p.num_slots) continue;
        const bool valid = id[i] >= 0 && id[i] < p.num_experts;
        p.staged_idx[slot] = valid ? static_cast<uint16_t>(id[i]) : layout::kMaskedExpert;
        p.staged_weights[slot] = weight[i];
        if (!valid && id[i] != -1) record_bad_id(p, slot, id[i]);
    }
}

}  // namespace mega_moe::device
