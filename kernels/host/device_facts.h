#pragma once
#include "mega_moe/status.h"

namespace mega_moe {

struct DeviceFacts {
    int compute_capability;  // 10 * major + minor
    int num_sms;
    int max_shared_bytes;  // that one block may ask for
};

// Reads the driver's attributes; creates no context.
Status read_device_facts(int device, DeviceFacts& facts) noexcept;

}  // namespace mega_moe
