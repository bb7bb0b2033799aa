#pragma once
#include <cstdint>

#include "device/common/e4m3_vector.cuh"
#include "device/common/group_scale.cuh"
#include "device/common/transpose_bytes.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "layout/quantize_weights_params.h"
#include "layout/weight_block.h"

namespace mega_moe::device {

inline constexpr int kPatchWarps = layout::kPatchThreads / 32;

struct QuantizeWeightsShared {
    alignas(16) uint8_t transposed[layout::kTransposedBytes];
    alignas(16) uint32_t amax[kPatchWarps];
};

// Largest magnitude of a block, of which each thread holds a patch.
__device__ __forceinline__ float amax_of_block(const uint4 (&v)[layout::kPatch],
                                               uint32_t (&shared)[kPatchWarps]) {
    uint32_t amax = amax_of_vector(v[0]);
#pragma unroll
    for (int i = 1; i < layout::kPatch; ++i)
        amax = ptx::max_abs_nan_bf16x2(amax, amax_of_vector(v[i]));
    amax = ptx::max_abs_nan_bf16x2(amax, __byte_perm(amax, 0, 0x1032));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        amax = ptx::max_abs_nan_bf16x2(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (const uint32_t other : shared)
        amax = ptx::max_abs_nan_bf16x2(amax, other);
    return ptx::low_bf16(ptx::abs_bf16x2(amax));
}

// Codes of a block in the order of the transposed copy, which start at `target`, its rows `pitch` bytes
// apart.
__device__ __forceinline__ void store_transposed(const uint8_t* shared, std::byte* target, int64_t pitch) {
    constexpr int kPieces = layout::kPatches / 2;  // of 16 bytes in a row
    constexpr int kRowsAtOnce = layout::kPatchThreads / kPieces;
    const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
    for (int first = 0; first < layout::kWeightBlock; first += kRowsAtOnce) {
        const int row = first + static_cast<int>(threadIdx.x) / kPieces;
        const bool swapped = layout::pieces_are_swapped(row);
        const uint4 codes = *reinterpret_cast<const uint4*>(
            shared + layout::transposed_piece(row, 2 * piece + (swapped ? 1 : 0)));
        ptx::store(target + row * pitch + piece * 16,
                   swapped ? uint4{codes.z, codes.w, codes.x, codes.y} : codes);
    }
}

// Quantizes one block of 128 x 128. Rows of it are 256 bytes to read and 128 to write, in either copy, and
// blocks of neighboring numbers, which run at once, are neighbours along the rows.
__device__ __forceinline__ void quantize_weight_block(const layout::QuantizeWeightsParams& p, uint32_t block,
                                                      QuantizeWeightsShared& shared) {
    using layout::kPatch;
    using layout::kPatches;
    using layout::kWeightBlock;
    const uint32_t column_block = block % p.column_blocks;
    const uint32_t rows_above = block / p.column_blocks;  // blocks, of all experts before this one too
    const int64_t columns = int64_t{p.column_blocks} * kWeightBlock;
    const int patch_row = static_cast<int>(threadIdx.x) / kPatches;
    const int patch_column = static_cast<int>(threadIdx.x) % kPatches;
    const int64_t first = (int64_t{rows_above} * kWeightBlock + patch_row * kPatch) * columns +
                          int64_t{column_block} * kWeightBlock + patch_column * kPatch;
    uint4 v[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        v[i] = ptx::load_stream(p.weight + (first + i * columns) * 2);

    const GroupScale scale = make_group_scale(amax_of_block(v, shared.amax), p.rounding);
    if (threadIdx.x == 0) ptx::store(p.scales + block, scale.scale);
    if (scale.lift != 1.0f) {
#pragma unroll
        for (uint4& vector : v)
            vector = ptx::scale_bf16x8(vector, scale.lift);
    }
    uint32_t codes[kPatch][2];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const uint2 row = quantize_vector(v[i], scale.high, scale.low);
        codes[i][0] = row.x;
        codes[i][1] = row.y;
        if (p.codes != nullptr) ptx::store(p.codes + first + i * columns, row);
    }
    if (p.codes_transposed == nullptr) return;
    transpose_8x8(codes);
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        *reinterpret_cast<uint2*>(shared.transposed +
                                  layout::transposed_piece(patch_column * kPatch + i, patch_row)) =
            uint2{codes[i][0], codes[i][1]};
    __syncthreads();
    const int64_t rows = int64_t{p.row_blocks} * kWeightBlock;
    const uint32_t expert = rows_above / p.row_blocks;
    const uint32_t row_block = rows_above % p.row_blocks;
    std::byte* target = p.codes_transposed +
                        (int64_t{expert} * columns + int64_t{column_block} * kWeightBlock) * rows +
                        int64_t{row_block} * kWeightBlock;
    store_transposed(shared.transposed, target, rows);
}

}  // namespace mega_moe::device
