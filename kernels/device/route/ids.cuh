#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "layout/route_params.h"
#include "layout/routing.h"

// Expert ids and routing weights of one token: from the caller's tensors, or from what a rank has published.
namespace mega_moe::device {

inline constexpr int kMaxTopK = layout::kMaxSlotsPerToken;

// Ids of the slots of a token as 16 bits, two in a register. Indices must be known at compile time.
struct TokenIds {
    std::uint32_t pair[kMaxTopK / 2];

    __device__ __forceinline__ std::uint32_t operator[](int slot) const {
        return slot % 2 == 0 ? pair[slot / 2] & 0xFFFFu : pair[slot / 2] >> 16;
    }
};

__device__ __forceinline__ TokenIds masked_ids() {
    TokenIds ids;
#pragma unroll
    for (int i = 0; i < kMaxTopK / 2; ++i)
        ids.pair[i] = 0xFFFFFFFFu;
    return ids;
}

__device__ __forceinline__ std::int64_t raw_id(const layout::RouteParams& p, std::int64_t pair) {
    return p.idx_is_64_bit ? static_cast<const std::int64_t*>(p.topk_idx)[pair]
                           : static_cast<const std::int32_t*>(p.topk_idx)[pair];
}

__device__ __forceinline__ std::uint32_t raw_weight_bits(const layout::RouteParams& p, std::int64_t pair) {
    return p.weights_are_bf16 ? std::uint32_t{static_cast<const std::uint16_t*>(p.topk_weights)[pair]} << 16
                              : static_cast<const std::uint32_t*>(p.topk_weights)[pair];
}

// The caller's ids of a token of this rank. Ids out of range are masked; `bad_slot` is the last of them, or
// -1.
__device__ __forceinline__ TokenIds raw_ids(const layout::RouteParams& p, std::int64_t token, int& bad_slot) {
    TokenIds ids = masked_ids();
    bad_slot = -1;
    // Half of the slots at a time: as 64-bit numbers all would take 32 registers.
#pragma unroll
    for (int half = 0; half < kMaxTopK; half += kMaxTopK / 2) {
        if (half >= p.top_k) break;
        std::int64_t id[kMaxTopK / 2];
#pragma unroll
        for (int i = 0; i < kMaxTopK / 2; ++i)
            id[i] = half + i < p.top_k ? raw_id(p, token * p.top_k + half + i) : -1;
#pragma unroll
        for (int i = 0; i < kMaxTopK / 2; ++i) {
            std::uint32_t& pair = ids.pair[(half + i) / 2];
            if (id[i] >= 0 && id[i] < p.num_experts) {
                const auto narrow = static_cast<std::uint32_t>(id[i]);
                pair = i % 2 == 0 ? (pair & 0xFFFF0000u) | narrow : (pair & 0xFFFFu) | narrow << 16;
            } else if (id[i] != -1) {
                bad_slot = half + i;
            }
        }
    }
    return ids;
}

// The published ids of a token, with the widest loads that rows of top_k ids allow.
__device__ __forceinline__ TokenIds published_ids(const std::uint16_t* row, int top_k) {
    TokenIds ids = masked_ids();
    if (top_k % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 8; ++i) {
            if (i * 8 >= top_k) continue;
            const uint4 v = ptx::load_relaxed_sys(reinterpret_cast<const uint4*>(row) + i);
            ids.pair[4 * i] = v.x;
            ids.pair[4 * i + 1] = v.y;
            ids.pair[4 * i + 2] = v.z;
            ids.pair[4 * i + 3] = v.w;
        }
    } else if (top_k % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 2; ++i)
            if (i * 2 < top_k)
                ids.pair[i] = ptx::load_relaxed_sys(reinterpret_cast<const std::uint32_t*>(row) + i);
    } else {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 2; ++i) {
            if (i * 2 >= top_k) continue;
            const std::uint32_t low = ptx::load_relaxed_sys(row + 2 * i);
            const std::uint32_t high = 2 * i + 1 < top_k ? ptx::load_relaxed_sys(row + 2 * i + 1) : 0xFFFFu;
            ids.pair[i] = low | high << 16;
        }
    }
    return ids;
}

__device__ __forceinline__ void store_ids(std::uint16_t* row, const TokenIds& ids, int top_k) {
    if (top_k % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 8; ++i)
            if (i * 8 < top_k)
                reinterpret_cast<uint4*>(row)[i] = {ids.pair[4 * i], ids.pair[4 * i + 1], ids.pair[4 * i + 2],
                                                    ids.pair[4 * i + 3]};
    } else {
#pragma unroll
        for (int slot = 0; slot < kMaxTopK; ++slot)
            if (slot < top_k) row[slot] = static_cast<std::uint16_t>(ids[slot]);
    }
}

__device__ __forceinline__ const std::uint16_t* published_row(const layout::RouteParams& p, int rank,
                                                              std::int64_t token, std::uint64_t epoch) {
    const std::int64_t bank = p.ids + static_cast<std::int64_t>(epoch % 2) * p.ids_bank;
    return p.endpoint.at<std::uint16_t>(rank, bank) + token * p.top_k;
}

__device__ __forceinline__ std::uint32_t* published_weights(const layout::RouteParams& p, int rank,
                                                            std::int64_t token, std::uint64_t epoch) {
    const std::int64_t bank = p.weights + static_cast<std::int64_t>(epoch % 2) * p.weights_bank;
    return p.endpoint.at<std::uint32_t>(rank, bank) + token * p.top_k;
}

// fp32 bits of a token's weights, loaded at once: a load for each row would be waited for before its store.
struct TokenWeights {
    std::uint32_t bits[kMaxTopK];
};

__device__ __forceinline__ TokenWeights raw_weights(const layout::RouteParams& p, std::int64_t token) {
    TokenWeights w{};
#pragma unroll
    for (int slot = 0; slot < kMaxTopK; ++slot)
        if (slot < p.top_k) w.bits[slot] = raw_weight_bits(p, token * p.top_k + slot);
    return w;
}

// A single rank publishes nothing and reads the caller's tensors.
__device__ __forceinline__ TokenWeights token_weights(const layout::RouteParams& p, int rank,
                                                      std::int64_t token, std::uint64_t epoch) {
    TokenWeights w{};
    if (!p.weighted) return w;
    if (p.endpoint.num_ranks == 1) return raw_weights(p, token);
    const std::uint32_t* row = published_weights(p, rank, token, epoch);
    if (p.top_k % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxTopK / 4; ++i) {
            if (i * 4 >= p.top_k) continue;
            const uint4 v = ptx::load_relaxed_sys(reinterpret_cast<const uint4*>(row) + i);
            w.bits[4 * i] = v.x;
            w.bits[4 * i + 1] = v.y;
            w.bits[4 * i + 2] = v.z;
            w.bits[4 * i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int slot = 0; slot < kMaxTopK; ++slot)
            if (slot < p.top_k) w.bits[slot] = ptx::load_relaxed_sys(row + slot);
    }
    return w;
}

}  // namespace mega_moe::device
