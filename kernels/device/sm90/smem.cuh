#pragma once
#include <cstdint>

#include "device/common/ring_cursor.cuh"
#include "device/common/role_smem.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/sm90/facts.cuh"
#include "device/sm90/mma/operand.cuh"
#include "layout/layer_shared.h"

namespace mega_moe::device::sm90 {

inline constexpr int kStoreBytes = 16 * kOperandRowBytes;  // a warp's 16 rows x 64 bf16 or 128 e4m3
inline constexpr int kStoreScaleBytes = 16 * 4;            // a warp's 16 rows
inline constexpr int kColumnScaleBytes = 16;  // of a stage's first and second 128 columns, and two unused

// Byte offsets in a CTA's shared memory, from a multiple of 1024 on, from which the 128-byte swizzle counts.
// The stages come first; the routing phase uses everything below `ring` before they are filled.
struct SmemOffsets : RoleSmemOffsets {
    int store;
    int x_scales;    // of a forward in fp8 alone
    int row_scales;  // of either direction in fp8, as the next two
    int column_scales;
    int store_scales;
    int factors;         // of wgrad in fp8: reciprocal scale factors of 256 columns
    int amax;            // twice what each warp's part of 128 x 128 elements has
    int stage_barriers;  // of full and of empty stages
    int total;           // to ask for, whatever the start of the CTA's shared memory is
};

template <class Facts>
constexpr SmemOffsets smem_offsets(int pull_buffers, int pull_bytes) {
    const bool fp8 = Facts::kFp8;
    const bool dispatches_fp8 = Facts::kDispatchesFp8;
    const bool fp8_wgrad = Facts::kFp8Wgrad;
    const int stages = Facts::kStages;
    SmemOffsets s{};
    s.store = stages * Facts::kStageBytes;
    s.pull = s.store + Facts::kMathWarps * kStoreBytes;
    s.x_scales = s.pull + pull_buffers * pull_bytes;
    s.row_scales = s.x_scales + (dispatches_fp8 ? layout::kXScaleBuffers * layout::kXScaleBytes : 0);
    s.column_scales = s.row_scales + (fp8 ? stages * layout::kRowScaleBytes : 0);
    s.store_scales = s.column_scales + (fp8 ? stages * kColumnScaleBytes : 0);
    // With wgrad in fp8 they lie in the store buffers, which no copy may read by then anyway.
    s.factors = s.store_scales + (fp8 && !fp8_wgrad ? Facts::kMathWarps * kStoreScaleBytes : 0);
    s.amax = s.factors + (fp8_wgrad ? Facts::kBlockN * 4 : 0);
    s.pull_scales = s.amax + (fp8_wgrad ? 2 * Facts::kMathWarps * 4 : 0);
    s.pieces = s.pull_scales + (dispatches_fp8 ? pull_buffers * (pull_bytes / layout::kQuantGroup * 4) : 0);
    s.ring = s.pieces + (dispatches_fp8 ? (layout::kPullPieces * layout::kPullPieceBytes + 15) / 16 * 16 : 0);
    s.mailbox = s.ring + layout::kTileRing * layout::kTileRecordBytes;
    s.stage_barriers = s.mailbox + layout::kMailbox * 4;
    s.role_barriers = s.stage_barriers + 8 * 2 * stages;
    s.epoch = s.role_barriers + 8 * (2 * layout::kTileRing + layout::kMailbox + pull_buffers);
    s.state = s.epoch + 8;
    s.total = 1024 + s.state + 16;
    return s;
}

// Alignment of copy targets: with the swizzle to multiples of 1024, boxes of others to 128, bulk copies
// to 16.
constexpr bool is_aligned(const SmemOffsets& s) {
    return s.store % 1024 == 0 && s.pull % 16 == 0 && s.x_scales % 128 == 0 && s.row_scales % 16 == 0 &&
           s.column_scales % 16 == 0 && s.store_scales % 16 == 0 && s.factors % 8 == 0 && s.amax % 4 == 0 &&
           s.pull_scales % 16 == 0 && s.ring % 16 == 0 && s.stage_barriers % 8 == 0 && s.epoch % 8 == 0;
}

// As shared addresses.
template <class C>
struct Smem : RoleSmem<C> {
    using RoleSmem<C>::base;

    __device__ __forceinline__ explicit Smem(std::byte* raw) : RoleSmem<C>(raw) {}

    __device__ __forceinline__ std::uint32_t a(int stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ std::uint32_t b(int stage) const { return a(stage) + C::kBytesA; }
    __device__ __forceinline__ std::uint32_t store_buffer(int warp) const {
        return base + C::kAt.store + warp * kStoreBytes;
    }
    // Scale factors, in fp8 alone.
    __device__ __forceinline__ std::uint32_t x_scales(int buffer) const {
        return base + C::kAt.x_scales + buffer * layout::kXScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t row_scales(int stage) const {
        return base + C::kAt.row_scales + stage * layout::kRowScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t column_scales(int stage) const {
        return base + C::kAt.column_scales + stage * kColumnScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t store_scales(int warp) const {
        if constexpr (C::kFp8Wgrad) return store_buffer(warp) + kStoreBytes / 2;
        return base + C::kAt.store_scales + warp * kStoreScaleBytes;
    }
    // With wgrad in fp8 only.
    __device__ __forceinline__ std::uint32_t factors() const { return base + C::kAt.factors; }
    __device__ __forceinline__ std::uint32_t amax(int buffer) const {
        return base + C::kAt.amax + buffer * C::kMathWarps * 4;
    }
    __device__ __forceinline__ std::uint32_t full(int stage) const {
        return base + C::kAt.stage_barriers + 8 * stage;
    }
    __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(C::kStages + stage); }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < C::kStages; ++i) {
            // Scale factors of columns come by a copy that counts by itself.
            ptx::mbarrier_init(full(i), C::kFp8 ? 2 : 1);
            // The warps that read the stage, of both CTAs: the loads of either fill both.
            ptx::mbarrier_init(empty(i), C::kMathWarps * C::kClusterSize);
        }
        this->init_role_barriers(1 + C::kMathWarps);  // the loading warp, the math warps
        ptx::fence_mbarrier_init();
    }
};

}  // namespace mega_moe::device::sm90
