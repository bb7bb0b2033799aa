#pragma once
#include "host/device_facts.h"
#include "host/variant.h"
#include "mega_moe/status.h"

namespace mega_moe {

// Makes `device` current, reads its facts and selects the kernel among those compiled.
Status prepare_launch(const VariantKey& key, int device, DeviceFacts& facts,
                      const Variant*& variant) noexcept;

// Launches `variant`, whose facts are `kernel`, on `stream` with one parameter.
Status launch_variant(const Variant& variant, const layout::KernelFacts& kernel, unsigned blocks,
                      int shared_bytes, void* parameter, void* stream) noexcept;

// Launches a kernel whose blocks wait for one another: refused by the driver unless all fit on the device at
// once. In clusters of kernel.cluster_size.
Status launch_cooperative(const Variant& variant, const layout::KernelFacts& kernel, unsigned blocks,
                          int shared_bytes, void* parameter, void* stream) noexcept;

}  // namespace mega_moe
