#pragma once
#include <cstdint>

#include "mega_moe/mode.h"

namespace mega_moe {

// What the extents of a layer must be multiples of.
struct Multiples {
    std::int64_t hidden;
    std::int64_t intermediate;
};

// For every kernel that the mode may launch in one direction; {1, 1} where it launches none.
Multiples layer_multiples(const Mode& mode, Direction direction) noexcept;

}  // namespace mega_moe
