#pragma once

namespace mega_moe::layout {

// The driver's CUtensorMap, in bytes that device code can take without the driver's header.
struct alignas(128) TensorMap {
    unsigned char bytes[128];
};

}  // namespace mega_moe::layout
