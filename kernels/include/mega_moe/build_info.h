#pragma once

namespace mega_moe {

// The content of build.json: CUDA version, architectures, targeted torch, hash of the kernel sources,
// version.
const char* build_info() noexcept;

}  // namespace mega_moe
