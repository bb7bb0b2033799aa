#pragma once
#include <cstdint>

#include "mega_moe/mode.h"

namespace mega_moe {

// What the memory of a rank's buffer depends on. Equal on all ranks.
struct BufferShape {
    std::int64_t max_tokens;
    std::int64_t top_k;
    std::int64_t num_experts;
    std::int64_t hidden;
    std::int64_t intermediate;  // 0 where the mode has no forward
    std::int64_t num_ranks;
    std::int64_t pool_rows;  // padded rows of one of the pools
    Mode mode;
    bool canaries;  // with untouched bytes between parts

    std::int64_t num_local() const { return num_experts / num_ranks; }
};

struct NamedPart {
    const char* name;
    std::int64_t offset;
    std::int64_t bytes;
};

inline constexpr int kMaxLayoutParts = 40;

// Parts of a buffer in order; the rest of the array is unused.
struct LayoutTable {
    NamedPart parts[kMaxLayoutParts];
    int count;
    std::int64_t total;
};

// The part of each rank that its peers reach; and the rank's own memory. Both 256-byte aligned and zero at
// first.
LayoutTable symmetric_layout(const BufferShape& shape) noexcept;
LayoutTable workspace_layout(const BufferShape& shape) noexcept;
// Padded rows that the smallest and the largest useful pool have: one block of tokens, and everything at
// once.
std::int64_t smallest_pool_rows(const BufferShape& shape) noexcept;
std::int64_t largest_pool_rows(const BufferShape& shape) noexcept;
// What hidden and intermediate must be multiples of for the kernel of one direction.
struct Multiples {
    std::int64_t hidden;
    std::int64_t intermediate;
};
Multiples layer_multiples(const Mode& mode, Direction direction) noexcept;
// int32 words that a launch reports.
std::int64_t summary_length(const BufferShape& shape) noexcept;

}  // namespace mega_moe
