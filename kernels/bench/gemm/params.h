#pragma once
#include "bench/common/clock_span.h"
#include "bench/common/tensor_map.h"

namespace mega_moe::bench {

// d[M, N] = a[M, K] b[N, K]^T. Clusters take the cluster tiles round robin, n fastest.
struct GemmParams {
    layout::TensorMap a;
    layout::TensorMap b;
    layout::TensorMap d;
    int num_tiles;  // cluster tiles
    int num_n_tiles;
    int num_k_blocks;
    int rows;              // M
    const float* a_scale;  // [K / 128, M]; promoted e4m3 alone
    const float* b_scale;  // [N / 128, K / 128]
    ClockSpan* clock;
};

}  // namespace mega_moe::bench
