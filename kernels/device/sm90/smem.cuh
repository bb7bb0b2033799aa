#pragma once
#include <cstdint>

#include "device/common/ring_cursor.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/sm90/mma/operand.cuh"
#include "layout/layer_shared.h"
#include "layout/tiles.h"

namespace mega_moe::device::sm90 {

template <class C>
struct Smem;

// Compile-time facts of a layer's kernel. Each of two math warpgroups takes half of the rows of every tile.
// The form that `Saves` can leave gate and up in memory, or find them there. The scheduler is `Ring` tiles
// ahead at most; `Moved` tensors travel to the experts.
template <int Stages, bool Trace, bool Saves, int Ring, int Moved, int CommRegisters, int MathRegisters,
          layout::LayerForm Form = layout::LayerForm::kBf16>
struct LayerConfig {
    using Smem = sm90::Smem<LayerConfig>;
    static constexpr int kStages = Stages;
    static constexpr bool kTrace = Trace;
    static constexpr bool kSaves = Saves;
    static constexpr int kThreads = 384;
    static constexpr int kClusterSize = 2;
    // What 384 threads x 168 registers leave for three warpgroups.
    static constexpr int kCommRegisters = CommRegisters;
    static constexpr int kMathRegisters = MathRegisters;
    static_assert(kCommRegisters + 2 * kMathRegisters <= 504, "registers at launch");
    static constexpr int kSumLoads = kCommRegisters > 100 ? 8 : 4;

    static constexpr bool kQuantized = Form != layout::LayerForm::kBf16;  // products are of e4m3
    static constexpr bool kMovesE4m3 = Form == layout::LayerForm::kFp8Forward;
    static constexpr bool kQuantizesGradients = Form == layout::LayerForm::kFp8Gradients;
    static constexpr bool kQuantizesRows = Form == layout::LayerForm::kFp8Backward || kQuantizesGradients;
    static constexpr int kElementBytes = kQuantized ? 1 : 2;  // of the operands of products
    static constexpr int kMovedBytes = kMovesE4m3 ? 1 : 2;    // of an element of the rows that travel
    static constexpr int kBlockK = 128 / kElementBytes;       // one row of the swizzle
    static constexpr int kBytesA = layout::kStageBytesA;
    static constexpr int kBytesB = layout::kStageBytesB;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    static constexpr int kRing = Ring;
    static constexpr int kMoved = Moved;
    static constexpr layout::LayerShared kAt = layout::make_layer_shared(Stages, Form);
    static constexpr int kPullBuffers = kAt.pull_buffers;
    static constexpr int kPullBytes = kAt.pull_bytes;
    static_assert(kAt.total <= 232448, "shared memory of a block");
    static_assert(kRing <= layout::kTileRing, "records");
    static_assert(kOperandRowBytes == 128, "stages");
};

// Where things lie in a CTA's shared memory, as shared addresses.
template <class C>
struct Smem {
    std::uint32_t base;
    std::byte* generic;  // the same place

    __device__ __forceinline__ explicit Smem(std::byte* raw) {
        const std::uint32_t start = ptx::shared_address(raw);
        base = (start + 1023) & ~1023u;
        generic = raw + (base - start);
    }
    __device__ __forceinline__ std::uint32_t a(int stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ std::uint32_t b(int stage) const { return a(stage) + C::kBytesA; }
    __device__ __forceinline__ std::uint32_t store_buffer(int warp) const {
        return base + C::kAt.store + warp * layout::kStoreBytes;
    }
    __device__ __forceinline__ std::uint32_t pull_buffer(int i) const {
        return base + C::kAt.pull + i * C::kPullBytes;
    }
    // Scale factors, in a quantized layer alone.
    __device__ __forceinline__ std::uint32_t x_scales(int buffer) const {
        return base + C::kAt.x_scales + buffer * layout::kXScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t row_scales(int stage) const {
        return base + C::kAt.row_scales + stage * layout::kRowScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t column_scales(int stage) const {
        return base + C::kAt.column_scales + stage * layout::kColumnScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t store_scales(int warp) const {
        if constexpr (C::kQuantizesGradients) return store_buffer(warp) + layout::kStoreBytes / 2;
        return base + C::kAt.store_scales + warp * layout::kStoreScaleBytes;
    }
    // Of gradients in e4m3 alone.
    __device__ __forceinline__ std::uint32_t factors() const { return base + C::kAt.factors; }
    __device__ __forceinline__ std::uint32_t amax(int turn) const {
        return base + C::kAt.amax + turn * layout::kMathWarps * 4;
    }
    __device__ __forceinline__ std::uint32_t pull_scales(int buffer) const {
        return base + C::kAt.pull_scales + buffer * layout::kPullScaleBytes;
    }
    __device__ __forceinline__ std::uint32_t* piece(int i) const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.pieces + i * layout::kPullPieceBytes);
    }
    __device__ __forceinline__ std::byte* record(int i) const {
        return generic + C::kAt.ring + i * layout::kTileRecordBytes;
    }
    __device__ __forceinline__ std::uint32_t barrier(int i) const { return base + C::kAt.barriers + 8 * i; }
    __device__ __forceinline__ std::uint32_t full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ std::uint32_t empty(int stage) const { return barrier(C::kStages + stage); }
    __device__ __forceinline__ std::uint32_t ring_full(int i) const { return barrier(2 * C::kStages + i); }
    __device__ __forceinline__ std::uint32_t ring_empty(int i) const { return ring_full(C::kRing + i); }
    __device__ __forceinline__ std::uint32_t mail(int i) const { return ring_full(2 * C::kRing + i); }
    __device__ __forceinline__ std::uint32_t pulled(int i) const { return mail(layout::kMailbox + i); }
    __device__ __forceinline__ std::uint32_t letter(int i) const { return base + C::kAt.mailbox + 4 * i; }
    __device__ __forceinline__ std::uint32_t* letter_value(int i) const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.mailbox) + i;
    }
    // Words by which the CTAs of a cluster tell each other that they have the tables.
    __device__ __forceinline__ std::uint32_t state_address(int i) const {
        return base + C::kAt.state + 4 * i;
    }
    // Number of the launch.
    __device__ __forceinline__ std::uint64_t* epoch() const {
        return reinterpret_cast<std::uint64_t*>(generic + C::kAt.epoch);
    }
    __device__ __forceinline__ std::uint32_t* state() const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.state);
    }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < C::kStages; ++i) {
            // Scale factors of columns come by a copy that counts by itself.
            ptx::mbarrier_init(full(i), C::kQuantized ? 2 : 1);
            // The warps that read the stage, of both CTAs: the loads of either fill both.
            ptx::mbarrier_init(empty(i), layout::kMathWarps * C::kClusterSize);
        }
        for (int i = 0; i < C::kRing; ++i) {
            ptx::mbarrier_init(ring_full(i), 1);
            ptx::mbarrier_init(ring_empty(i), 1 + layout::kMathWarps);  // the loading warp, the math warps
        }
        for (int i = 0; i < layout::kMailbox; ++i)
            ptx::mbarrier_init(mail(i), 1);
        for (int i = 0; i < C::kPullBuffers; ++i)
            ptx::mbarrier_init(pulled(i), 1);
        ptx::fence_mbarrier_init();
    }
};

}  // namespace mega_moe::device::sm90
