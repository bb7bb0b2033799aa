#pragma once
#include <cstdint>

#include "layout/tensor_map.h"
#include "mega_moe/status.h"

namespace mega_moe {

// Row-major bf16 [rows, columns], 16-byte aligned, as boxes of box_rows x 64 columns that land with the
// 128-byte swizzle. `what` names the tensor in an error.
Status map_rows(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                std::uint32_t box_rows, layout::TensorMap& map) noexcept;

// Row-major e4m3 [rows, columns], 16-byte aligned, as boxes of box_rows x 128 columns in that swizzle.
Status map_e4m3_rows(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                     std::uint32_t box_rows, layout::TensorMap& map) noexcept;

// Row-major fp32 [rows, columns] as boxes that land row after row. A row and a row of a box are multiples of
// 16 bytes.
Status map_scales(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                  std::uint32_t box_rows, std::uint32_t box_columns, layout::TensorMap& map) noexcept;

// Row-major bf16 [rows, columns] as boxes of 64 rows x 64 columns x `box_blocks` neighboring blocks of 64
// columns, which land block after block: an operand that is contracted along its rows. Columns are a multiple
// of 64; blocks beyond them are zero.
Status map_blocks(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                  std::uint32_t box_blocks, layout::TensorMap& map) noexcept;

}  // namespace mega_moe
