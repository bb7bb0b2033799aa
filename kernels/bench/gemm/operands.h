#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "bench/common/device_array.h"
#include "bench/gemm/variant.h"

namespace mega_moe::bench {

struct Shape {
    const char* name;
    int m;
    int n;
    int k;

    std::int64_t outputs() const { return std::int64_t{m} * n; }
    double flops() const { return 2.0 * m * n * k; }
};

// Memory for the operands of any shape up to the given extents. Elements are two bytes or one, so a GEMM
// in e4m3 uses half.
struct Operands {
    Operands(std::int64_t max_a, std::int64_t max_b, std::int64_t max_d, int max_m, int max_n, int max_k);

    DeviceArray<std::uint8_t> a;
    DeviceArray<std::uint8_t> b;
    DeviceArray<std::uint16_t> d;  // bf16 [M, N]
    DeviceArray<float> a_scale;    // [K / 128, M]
    DeviceArray<float> b_scale;    // [N / 128, K / 128]

    // Random normal elements and scales in [0.5, 1.5), the same for the same seed; in the layout of
    // `variant`.
    void fill(const Shape& shape, const GemmVariant& variant, std::uint32_t seed, cudaStream_t stream);
};

struct Comparison {
    double relative_error;  // Frobenius norm of the difference over that of the reference
    std::int64_t not_finite;
};

// Judges `count` entries of d, evenly spread (all of them when count is M N), against fp32 sums over the same
// elements.
Comparison compare(const Operands& operands, const Shape& shape, const GemmVariant& variant,
                   std::int64_t count, cudaStream_t stream);

}  // namespace mega_moe::bench
