#pragma once
#include <cstdint>

namespace mega_moe {

// Token numbers travel in 20 bits with a slot number, and expert ids in 16 bits with 0xFFFF for a masked
// slot.
inline constexpr std::int64_t kMaxTokensPerRank = (std::int64_t{1} << 20) - 1;
inline constexpr std::int64_t kMaxTopK = 16;
inline constexpr std::int64_t kMaxExperts = 2048;
inline constexpr std::int64_t kMaxHidden = 65536;
inline constexpr std::int64_t kMaxIntermediate = 65536;
inline constexpr std::int64_t kMaxRanks = 32;

}  // namespace mega_moe
