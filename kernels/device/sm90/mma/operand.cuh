#pragma once
#include <cstdint>

#include "layout/gradient_operands.h"

// Descriptors by which wgmma finds its operands in shared memory: blocks of 64 rows x 128 bytes, 8192 bytes
// each, as a TMA box with the 128-byte swizzle leaves them.
//   K-major    a row is 128 bytes along the contraction; boxes of rows follow one another
//   MN-major   a row is 64 bf16 along M or N, one per step of the contraction (64 of them); the next 64 of M
//   or N follow
namespace mega_moe::device::sm90 {

enum class Major { kK, kMn };

inline constexpr int kOperandRowBytes = 128;
// Descriptors count in units of 16 bytes; so do the steps, which are added to them.
inline constexpr uint64_t kStepOf64Rows = 64 * kOperandRowBytes / 16;
// To the next 32 bytes of the contraction in K-major, to the next 16 of its steps in MN-major.
template <Major M>
inline constexpr uint64_t kStepOfInstruction = (M == Major::kK ? 32 : 16 * kOperandRowBytes) / 16;

// The high word of each: the swizzle, and the distance of eight rows.
inline constexpr uint32_t kDescriptorHigh = uint32_t{1} << 30 | 8 * kOperandRowBytes / 16;

// The low word.
template <Major M>
__device__ __forceinline__ uint32_t descriptor_low(uint32_t shared) {
    // From 64 elements of M or N to the next; K-major ignores it.
    constexpr auto kNextBlock = static_cast<uint32_t>((M == Major::kK ? 1 : kStepOf64Rows) << 16);
    // In a cluster the address carries the block's rank above bit 24, which would spill into the field of
    // kNextBlock: right in K-major, garbage in MN-major, in odd blocks only.
    return kNextBlock | (shared & 0x3FFFF) >> 4;
}

// How rows or columns of an e4m3 GEMM lie in a stage, K-major either way, in units of descriptors.
// Operands of e4m3, 128 elements of the contraction in a row:
struct SwizzledRows {
    static constexpr uint32_t kHigh = kDescriptorHigh;
    static constexpr auto kStep = static_cast<uint32_t>(kStepOfInstruction<Major::kK>);
    static constexpr int kWarpgroupBytes = 64 * kOperandRowBytes;  // its rows
    static __device__ __forceinline__ uint32_t low(uint32_t shared) {
        return descriptor_low<Major::kK>(shared);
    }
    static __device__ __forceinline__ uint32_t columns(int pass) {
        return pass * static_cast<uint32_t>(kStepOf64Rows);
    }
};
// Blocks of slabs (layout/gradient_operands.h), without a swizzle: the high word has the distance of eight
// rows or columns, the low one that of 16 of the contraction.
struct TransposedSlabs {
    static constexpr uint32_t kHigh = 8 * layout::kSlabRows / 16;
    static constexpr uint32_t kStep = 2 * layout::kSlabBytes / 16;
    static constexpr int kWarpgroupBytes = 64 * layout::kSlabRows;
    static __device__ __forceinline__ uint32_t low(uint32_t shared) {
        return uint32_t{layout::kSlabBytes / 16} << 16 | (shared & 0x3FFFF) >> 4;
    }
    static __device__ __forceinline__ uint32_t columns(int pass) {
        return (pass / 2 * layout::kTransposedBytes + pass % 2 * kWarpgroupBytes) / 16;
    }
};

template <Major M>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t shared) {
    return uint64_t{kDescriptorHigh} << 32 | descriptor_low<M>(shared);
}

}  // namespace mega_moe::device::sm90
