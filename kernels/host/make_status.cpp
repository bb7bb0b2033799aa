#include "host/make_status.h"

#include <cstdarg>
#include <cstdio>

namespace mega_moe {

Status error_status(const char* format, ...) noexcept {
    Status status{false, {}};
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message, sizeof(status.message), format, arguments);
    va_end(arguments);
    return status;
}

Status cuda_status(cudaError_t error, const char* what) noexcept {
    if (error == cudaSuccess) return ok_status();
    // The runtime would hand the same error to the next caller that asks for the last one.
    static_cast<void>(cudaGetLastError());
    return error_status("%s: %s: %s", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

}  // namespace mega_moe
