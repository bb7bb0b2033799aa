#include "bench/gemm/operands.h"

#include <algorithm>
#include <cmath>

#include "bench/common/check.h"
#include "device/ptx/convert_bf16x2.cuh"
#include "device/ptx/e4m3.cuh"

namespace mega_moe::bench {
namespace {

constexpr int kBlocks = 1056;
constexpr int kThreads = 256;

__device__ uint32_t hashed(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return static_cast<uint32_t>(x >> 32);
}

// In (0, 1).
__device__ float uniform(uint64_t x) {
    return (static_cast<float>(hashed(x) >> 8) + 0.5f) * 0x1p-24f;
}

// Two independent ones per index.
__device__ float2 normal(uint64_t x) {
    const float radius = sqrtf(-2.0f * __logf(uniform(2 * x)));
    const float angle = 6.2831853f * uniform(2 * x + 1);
    return {radius * __cosf(angle), radius * __sinf(angle)};
}

__global__ void fill_normal_bf16(uint32_t* out, int64_t pairs, uint64_t seed) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) {
        const float2 v = normal(seed << 40 | i);
        out[i] = device::ptx::convert_bf16x2(v.x, v.y);
    }
}

__global__ void fill_normal_e4m3(uint16_t* out, int64_t pairs, uint64_t seed) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) {
        const float2 v = normal(seed << 40 | i);
        out[i] = device::ptx::convert_e4m3x2(v.x, v.y);
    }
}

__global__ void fill_scales(float* out, int64_t count, uint64_t seed) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        out[i] = 0.5f + uniform(seed << 40 | i);
    }
}

__device__ float bf16_value(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ float e4m3_value(uint8_t bits) {
    const int exponent = bits >> 3 & 15;
    const int mantissa = bits & 7;
    const float magnitude = exponent ? ldexpf(static_cast<float>(8 + mantissa), exponent - 10)
                                     : ldexpf(static_cast<float>(mantissa), -9);
    return bits & 128 ? -magnitude : magnitude;
}

struct Matrix {
    const void* data;
    int64_t row_stride;
    int64_t k_stride;
    bool e4m3;

    __device__ float at(int64_t row, int64_t k) const {
        const int64_t i = row * row_stride + k * k_stride;
        return e4m3 ? e4m3_value(static_cast<const uint8_t*>(data)[i])
                    : bf16_value(static_cast<const uint16_t*>(data)[i]);
    }
};

struct CompareParams {
    Matrix a;
    Matrix b;
    const uint16_t* d;
    const float* a_scale;  // null: none
    const float* b_scale;
    int m;
    int n;
    int k;
    int64_t count;
    double* squares;  // of difference, of reference
    unsigned long long* not_finite;
};

// One warp per entry.
__global__ void compare_entries(const CompareParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
    const int64_t outputs = static_cast<int64_t>(p.m) * p.n;
    double difference = 0;
    double reference = 0;
    unsigned long long not_finite = 0;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < p.count;
         i += warps) {
        // A prime step visits all entries when all are wanted, and all places within a tile otherwise.
        const int64_t entry = p.count == outputs ? i : i * 1000003 % outputs;
        const int64_t row = entry / p.n;
        const int64_t column = entry % p.n;
        float sum = 0;
        for (int k = lane; k < p.k; k += 32) {
            float product = p.a.at(row, k) * p.b.at(column, k);
            if (p.a_scale != nullptr) {
                product *= p.a_scale[k / 128 * static_cast<int64_t>(p.m) + row] *
                           p.b_scale[column / 128 * (p.k / 128) + k / 128];
            }
            sum += product;
        }
        for (int mask = 16; mask > 0; mask /= 2)
            sum += __shfl_xor_sync(~0u, sum, mask);
        const float got = bf16_value(p.d[entry]);
        if (isfinite(got)) {
            difference += static_cast<double>(got - sum) * (got - sum);
        } else {
            ++not_finite;
        }
        reference += static_cast<double>(sum) * sum;
    }
    if (lane == 0) {
        atomicAdd(p.squares, difference);
        atomicAdd(p.squares + 1, reference);
        atomicAdd(p.not_finite, not_finite);
    }
}

Matrix matrix(const void* data, bool mn_major, bool e4m3, int rows, int k) {
    return {data, mn_major ? 1 : k, mn_major ? rows : 1, e4m3};
}

void fill_matrix(void* data, std::int64_t elements, bool e4m3, std::uint64_t seed, cudaStream_t stream) {
    if (e4m3) {
        fill_normal_e4m3<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint16_t*>(data), elements / 2, seed);
    } else {
        fill_normal_bf16<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint32_t*>(data), elements / 2, seed);
    }
    check(cudaGetLastError(), "fill_normal");
}

}  // namespace

Operands::Operands(std::int64_t max_a, std::int64_t max_b, std::int64_t max_d, int max_m, int max_n,
                   int max_k)
    : a(static_cast<std::size_t>(2 * max_a)),
      b(static_cast<std::size_t>(2 * max_b)),
      d(static_cast<std::size_t>(max_d)),
      a_scale(static_cast<std::size_t>(max_m) * (max_k / 128)),
      b_scale(static_cast<std::size_t>(max_n / 128) * (max_k / 128)) {}

void Operands::fill(const Shape& shape, const GemmVariant& variant, std::uint32_t seed, cudaStream_t stream) {
    const std::int64_t k_scales = shape.k / 128;
    fill_matrix(a.data(), std::int64_t{shape.m} * shape.k, variant.e4m3, seed, stream);
    fill_matrix(b.data(), std::int64_t{shape.n} * shape.k, variant.e4m3, seed + 1, stream);
    fill_scales<<<kBlocks, kThreads, 0, stream>>>(a_scale.data(), k_scales * shape.m, seed + 2);
    fill_scales<<<kBlocks, kThreads, 0, stream>>>(b_scale.data(), k_scales * (shape.n / 128), seed + 3);
    check(cudaGetLastError(), "fill_scales");
}

Comparison compare(const Operands& operands, const Shape& shape, const GemmVariant& variant,
                   std::int64_t count, cudaStream_t stream) {
    DeviceArray<double> squares(2);
    DeviceArray<unsigned long long> not_finite(1);
    squares.fill_bytes(0);
    not_finite.fill_bytes(0);
    CompareParams p = {};
    p.a = matrix(operands.a.data(), variant.a_mn_major, variant.e4m3, shape.m, shape.k);
    p.b = matrix(operands.b.data(), variant.b_mn_major, variant.e4m3, shape.n, shape.k);
    p.d = operands.d.data();
    p.a_scale = variant.promoted ? operands.a_scale.data() : nullptr;
    p.b_scale = operands.b_scale.data();
    p.m = shape.m;
    p.n = shape.n;
    p.k = shape.k;
    p.count = count;
    p.squares = squares.data();
    p.not_finite = not_finite.data();
    compare_entries<<<kBlocks, kThreads, 0, stream>>>(p);
    check(cudaGetLastError(), "compare_entries");
    check(cudaStreamSynchronize(stream), "compare_entries");
    const auto sums = squares.to_host();
    return {std::sqrt(sums[0] / sums[1]), static_cast<std::int64_t>(not_finite.to_host()[0])};
}

}  // namespace mega_moe::bench
