#pragma once
#include <iterator>

#include "bench/gemm/operands.h"

namespace mega_moe::bench {

// 16384 tokens with top-8 on one rank: the two forward GEMMs of the Qwen3 mixtures of experts with 30 and
// 235 billion parameters, as if all experts had one weight.
inline constexpr Shape kShapes[] = {{"30B gate and up", 131072, 1536, 2048},
                                    {"30B down", 131072, 2048, 768},
                                    {"235B gate and up", 131072, 3072, 4096},
                                    {"235B down", 131072, 4096, 1536}};

inline Operands operands_for_shapes() {
    return Operands(std::int64_t{131072} * 4096, std::int64_t{4096} * 4096, std::int64_t{131072} * 4096,
                    131072, 4096, 4096);
}

}  // namespace mega_moe::bench
