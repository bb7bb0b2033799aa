#pragma once
#include <cstdint>

#include "layout/tensor_map.h"

namespace mega_moe::bench {

using layout::TensorMap;

enum class MapElement { kByte, kBf16 };

// Tensors whose boxes are 128 bytes wide and land with the 128-byte swizzle; all throw with the driver's
// error number. Row-major [rows, columns]; boxes of box_rows x 128 bytes.
layout::TensorMap map_rows(const void* data, MapElement element, std::uint64_t rows, std::uint64_t columns,
                           std::uint32_t box_rows);
// [depth, columns] bf16 with the contraction along depth (MN-major): boxes of 64 columns x 64 depth,
// box_columns / 64 of them.
layout::TensorMap map_columns(const void* data, std::uint64_t depth, std::uint64_t columns,
                              std::uint32_t box_columns);

}  // namespace mega_moe::bench
