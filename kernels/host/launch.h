#pragma once
#include "host/device_facts.h"
#include "host/variant.h"
#include "mega_moe/status.h"

namespace mega_moe {

// Makes `device` current, reads its facts and selects the kernel among those compiled.
Status prepare_launch(Op op, Precision precision, int device, DeviceFacts& facts,
                      const Variant*& variant) noexcept;

// Launches `variant` on `stream` with one parameter.
Status launch_variant(const Variant& variant, unsigned blocks, int shared_bytes, void* parameter,
                      void* stream) noexcept;

// The same for kernels whose blocks wait for one another: refused by the driver unless all fit on the device
// at once.
Status launch_cooperative(const Variant& variant, unsigned blocks, int shared_bytes, void* parameter,
                          void* stream) noexcept;

// The same in clusters of `cluster` blocks.
Status launch_clusters(const Variant& variant, unsigned blocks, unsigned cluster, int shared_bytes,
                       void* parameter, void* stream) noexcept;

}  // namespace mega_moe
