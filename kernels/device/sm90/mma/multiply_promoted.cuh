#pragma once
#include <cstdint>

#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_e4m3.cuh"
#include "device/sm90/mma/operand.cuh"

// e4m3 GEMMs whose sums leave the tensor core every 128 of the contraction: there an accumulator keeps
// about 14 bits, and the scale factors change.
namespace mega_moe::device::sm90 {

// Low words of the descriptors of one stage: 64 rows and the columns, K-major.
struct StageOperands {
    std::uint32_t rows;
    std::uint32_t columns;
};

// Scale factors of one k-block: of the thread's rows, lane / 4 and + 8, and of the first and the second 128
// columns.
struct BlockScales {
    float rows[2];
    float columns[2];
};

// Partial sums of the passes that are under way.
using PartialSums = float[2][32];

// Starts the MMAs of one stage with 64 columns. `zero` is 0, which the compiler does not know.
template <class Stored>
__device__ __forceinline__ void start_pass(float (&partial)[32], std::uint32_t rows, std::uint32_t columns,
                                           std::uint32_t zero) {
    ptx::wgmma_fence();
    ptx::wgmma_e4m3_if<Stored::kHigh>(partial, rows, columns, zero);
#pragma unroll
    for (int k = 1; k < 4; ++k)
        ptx::wgmma_e4m3<Stored::kHigh>(partial, rows + k * Stored::kStep, columns + k * Stored::kStep);
    ptx::wgmma_commit();
}

__device__ __forceinline__ void promote_pass(float* sums, float (&partial)[32], float upper, float lower) {
    // Nothing that reads them may come before the wait for them.
#pragma unroll
    for (int i = 0; i < 32; ++i)
        asm volatile("" : "+f"(partial[i]));
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        sums[i] = fmaf(upper, partial[i], sums[i]);
        sums[i + 1] = fmaf(upper, partial[i + 1], sums[i + 1]);
        sums[i + 2] = fmaf(lower, partial[i + 2], sums[i + 2]);
        sums[i + 3] = fmaf(lower, partial[i + 3], sums[i + 3]);
    }
}

// sums += the scaled GEMMs of `Blocks` k-blocks with `Columns` x 2 columns. After the last nothing is
// under way: ptxas does not follow a pass around a loop, and would serialize all of them (C7514).
//   Source: Stored, how the operands lie; StageOperands open(), once the next stage is full; BlockScales
//   scales(), of the stage opened last; void close(int open), the oldest of the open stages may be
//   overwritten
template <int Blocks, int Columns, class Source>
__device__ __forceinline__ void multiply_blocks(float (&sums)[Columns], PartialSums& partial,
                                                std::uint32_t zero, Source& source) {
    using Stored = typename Source::Stored;
    constexpr int kPasses = Columns / 32;
    static_assert(kPasses % 2 == 0, "the first pass of a block takes the first partial sums");
    StageOperands at = source.open();
    start_pass<Stored>(partial[0], at.rows, at.columns, zero);
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
        const BlockScales scales = source.scales();
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int next = (pass + 1) % kPasses;
            if (block < Blocks - 1 || next != 0) {
                if (next == 0) at = source.open();
                start_pass<Stored>(partial[next % 2], at.rows, at.columns + Stored::columns(next), zero);
                ptx::wgmma_wait<1>();
            } else {
                ptx::wgmma_wait<0>();
            }
            if (next == 0) source.close(block < Blocks - 1 ? 2 : 1);
            const float columns = scales.columns[pass / 2];
            promote_pass(sums + 32 * pass, partial[pass % 2], scales.rows[0] * columns,
                         scales.rows[1] * columns);
        }
    }
}

// sums += the scaled GEMM of one k-block with 128 columns, one pass at a time: half of the partial sums,
// where registers are needed for more than MMAs.
template <class Source>
__device__ __forceinline__ void multiply_block_in_turn(float (&sums)[64], float (&partial)[32],
                                                       std::uint32_t zero, Source& source) {
    const StageOperands at = source.open();
    BlockScales scales;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        start_pass<SwizzledRows>(partial, at.rows, at.columns + SwizzledRows::columns(pass), zero);
        if (pass == 0) scales = source.scales();
        ptx::wgmma_wait<0>();
        if (pass == 1) source.close(1);
        promote_pass(sums + 32 * pass, partial, scales.rows[0] * scales.columns[0],
                     scales.rows[1] * scales.columns[0]);
    }
}

}  // namespace mega_moe::device::sm90
