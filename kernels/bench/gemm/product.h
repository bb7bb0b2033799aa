#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "bench/common/timing.h"
#include "bench/gemm/operands.h"
#include "bench/gemm/params.h"
#include "bench/gemm/variant.h"

namespace mega_moe::bench {

// One variant, bound to operands and a number of blocks.
class Product {
  public:
    // Throws std::invalid_argument when the shape does not fit the variant's tiles.
    Product(const GemmVariant& variant, const Operands& operands, const Shape& shape, int blocks,
            ClockSpan* clock, cudaStream_t stream);
    void launch();

  private:
    GemmVariant variant_;
    GemmParams params_;
    int blocks_;
    cudaStream_t stream_;
};

// Runs the variant twice on poisoned output, at shapes of one and of several tiles per block, and prints a
// check line for each. Returns whether all were right, finite and bitwise the same.
bool check_variant(const GemmVariant& variant, Operands& operands, ClockSpan* clock, int blocks,
                   cudaStream_t stream);

// Prints a check line for entries spread over the output that the last launch left.
bool check_output(const GemmVariant& variant, const Operands& operands, const Shape& shape, int blocks,
                  cudaStream_t stream);

// Prints a row: time, rate and the share of what the tensor cores of `blocks` SMs could do at that clock.
void print_rate(const char* group, const GemmVariant& variant, const Shape& shape, int blocks,
                const Timing& timing);

}  // namespace mega_moe::bench
