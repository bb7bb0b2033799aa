#pragma once
#include <cstdint>

#include "device/common/two_nans.cuh"
#include "device/ptx/bf16x2.cuh"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/global_memory.cuh"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/warp.cuh"
#include "layout/layer_shared.h"

// Sums of rows by a whole warp: the arithmetic of combine.
namespace mega_moe::device {

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], uint4 v) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += ptx::low_bf16(words[i]);
        sum[2 * i + 1] += ptx::high_bf16(words[i]);
    }
}

// What a sum takes: lane i holds the number of the i-th of `count` rows; `rows` and `out` are bf16 [.,
// hidden]. Nothing to do without an `out`; NaN for a result where `poison` says so.
struct RowSum {
    const std::byte* rows;
    int row;
    int count;
    std::byte* out;
    bool poison;
};

// out = row 0 + row 1 + ... in fp32, in this order, rounded once; zeros for no rows. Steps of 256 columns
// from byte `at` on, as long as there are `Steps` of them: then every load has its register, where a load
// under a predicate went to local memory. A lane has Rows x Steps loads in flight, each of 16 bytes.
template <int Rows, int Steps>
__device__ __forceinline__ void sum_steps(const RowSum& s, int row_bytes, int& at) {
    constexpr int kStepBytes = layout::kCombineColumns * 2;
    for (; at + Steps * kStepBytes <= row_bytes; at += Steps * kStepBytes) {
        const int lane_at = at + static_cast<int>(ptx::lane_id()) * 16;
        float sum[Steps][8] = {};
#pragma unroll 1
        for (int first = 0; first < s.count; first += Rows) {
            uint4 v[Rows][Steps] = {};
#pragma unroll
            for (int i = 0; i < Rows; ++i) {
                const std::byte* from =
                    s.rows + __shfl_sync(ptx::kAllLanes, s.row, first + i) * std::int64_t{row_bytes} +
                    lane_at;
                if (Rows > 1 && first + i >= s.count) continue;
#pragma unroll
                for (int step = 0; step < Steps; ++step)
                    v[i][step] =
                        ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(from + step * kStepBytes));
            }
#pragma unroll
            for (int i = 0; i < Rows; ++i) {
                if (Rows > 1 && first + i >= s.count) continue;
#pragma unroll
                for (int step = 0; step < Steps; ++step)
                    add_bf16x8(sum[step], v[i][step]);
            }
        }
#pragma unroll
        for (int step = 0; step < Steps; ++step) {
            const float (&f)[8] = sum[step];
            uint4 result{ptx::convert_bf16x2(f[0], f[1]), ptx::convert_bf16x2(f[2], f[3]),
                         ptx::convert_bf16x2(f[4], f[5]), ptx::convert_bf16x2(f[6], f[7])};
            if (s.poison) result = {kTwoNans, kTwoNans, kTwoNans, kTwoNans};
            ptx::store(s.out + lane_at + step * kStepBytes, result);
        }
    }
}

template <int Rows, int Steps>
__device__ __forceinline__ void sum_rows_by(const RowSum& s, int hidden) {
    int at = 0;
    sum_steps<Rows, Steps>(s, hidden * 2, at);
    sum_steps<Rows, 1>(s, hidden * 2, at);
}

// By one warp. A sum takes as long as its loads wait, so as many are under way as there are registers for:
// `Loads` of a lane, of more than four rows twice as many.
template <int Loads>
__device__ __forceinline__ void sum_rows(const RowSum& s, int hidden) {
    if (s.out == nullptr) return;
    if (s.count == 1)
        sum_rows_by<1, Loads>(s, hidden);
    else if (s.count == 2)
        sum_rows_by<2, Loads / 2>(s, hidden);
    else if (s.count <= 4)
        sum_rows_by<4, Loads / 4>(s, hidden);
    else
        sum_rows_by<8, Loads / 4>(s, hidden);
}

}  // namespace mega_moe::device
