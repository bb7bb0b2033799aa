#pragma once
#include <cstddef>

#include "host/variant.h"
#include "mega_moe/status.h"

namespace mega_moe {

// The kernel of `table` for a key on a device. Where there is none, `found` is null and the status names the
// device's compute capability and the architectures that the table holds for the key.
Status select_variant(const Variant* table, std::size_t size, const VariantKey& key, int compute_capability,
                      const Variant*& found) noexcept;

}  // namespace mega_moe
