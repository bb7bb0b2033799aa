#pragma once
#include <cstdint>

#include "device/ptx/bf16x2.cuh"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"

// Sums of rows by a whole warp: the arithmetic of combine.
namespace mega_moe::device {

// 16-byte loads that a thread has in flight: rows x steps of 256 columns. Twice as many would not fit into the
// registers of a communication warp.
inline constexpr int kRowsAtOnce = 4;
inline constexpr int kStepsAtOnce = 2;
inline constexpr std::uint32_t kTwoNans = 0x7FFF7FFFu;

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], uint4 v) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += ptx::low_bf16(words[i]);
        sum[2 * i + 1] += ptx::high_bf16(words[i]);
    }
}

// out = rows[row 0] + rows[row 1] + ... in fp32, in this order, rounded once. Lane i holds the number of the
// i-th row; `rows` and `out` are bf16 [., hidden]. Zeros for no rows, NaN where told so.
__device__ __forceinline__ void sum_rows(const std::byte* rows, int row, int count, std::byte* out, int hidden,
                                         bool poison) {
    constexpr int kStepBytes = 32 * 16;
    const std::int64_t row_bytes = std::int64_t{hidden} * 2;
    const std::int64_t lane_bytes = std::int64_t{ptx::lane_id()} * 16;
#pragma unroll 1
    for (std::int64_t at = lane_bytes; at < row_bytes; at += kStepsAtOnce * kStepBytes) {
        const bool has_second = at + kStepBytes < row_bytes;
        float sum[kStepsAtOnce][8] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += kRowsAtOnce) {
            uint4 v[kRowsAtOnce][kStepsAtOnce];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                const std::byte* from = rows + __shfl_sync(ptx::kAllLanes, row, first + i) * row_bytes + at;
                if (first + i >= count) continue;
                v[i][0] = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(from));
                if (has_second) v[i][1] = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(from + kStepBytes));
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                if (first + i >= count) continue;
                add_bf16x8(sum[0], v[i][0]);
                if (has_second) add_bf16x8(sum[1], v[i][1]);
            }
        }
#pragma unroll
        for (int step = 0; step < kStepsAtOnce; ++step) {
            if (step == 1 && !has_second) continue;
            const float(&s)[8] = sum[step];
            uint4 result{ptx::convert_bf16x2(s[0], s[1]), ptx::convert_bf16x2(s[2], s[3]),
                         ptx::convert_bf16x2(s[4], s[5]), ptx::convert_bf16x2(s[6], s[7])};
            if (poison) result = {kTwoNans, kTwoNans, kTwoNans, kTwoNans};
            ptx::store(out + at + step * kStepBytes, result);
        }
    }
}

}  // namespace mega_moe::device
