#pragma once
#include <cuda_runtime_api.h>

#include "mega_moe/status.h"

namespace mega_moe {

inline Status ok_status() noexcept {
    return Status{true, {}};
}

// printf-like; longer texts are cut.
__attribute__((format(printf, 1, 2))) Status error_status(const char* format, ...) noexcept;

// `what` names the call that returned `error`.
Status cuda_status(cudaError_t error, const char* what) noexcept;

}  // namespace mega_moe
