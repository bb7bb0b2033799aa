#pragma once
#include <cstdint>

namespace mega_moe::device {

// Two NaNs in bf16, and one in fp32.
inline constexpr std::uint32_t kTwoNans = 0x7FFF7FFFu;

}  // namespace mega_moe::device
