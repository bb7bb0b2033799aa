#pragma once
#include <cstdint>

namespace mega_moe::layout {

inline constexpr std::int64_t kPartAlignment =
    256;                                 // a bulk copy of any part starts on a full L2 sector group
inline constexpr int kQuantGroup = 128;  // elements of x that share a scale factor
inline constexpr std::uint16_t kMaskedExpert = 0xFFFF;  // stored for a slot without a valid expert
inline constexpr int kErrorWords = 8;                   // int32: 1, token, slot, id, 0, 0, 0, 0

// Byte offsets of the parts of a rank's staging area.
struct Staging {
    std::int64_t x;             // bf16 or e4m3 [max_tokens, hidden]
    std::int64_t x_sf;          // fp32 [max_tokens, hidden / 128]; empty unless quantized
    std::int64_t topk_idx;      // uint16 [max_tokens, top_k]
    std::int64_t topk_weights;  // fp32 [max_tokens, top_k]
    std::int64_t error;         // int32 [kErrorWords]
    std::int64_t total;
};

constexpr std::int64_t align_part(std::int64_t bytes) {
    return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

constexpr Staging make_staging(std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden,
                               bool quantize) {
    Staging s{};
    s.x = 0;
    s.x_sf = align_part(max_tokens * hidden * (quantize ? 1 : 2));
    s.topk_idx = s.x_sf + align_part(quantize ? max_tokens * (hidden / kQuantGroup) * 4 : 0);
    s.topk_weights = s.topk_idx + align_part(max_tokens * top_k * 2);
    s.error = s.topk_weights + align_part(max_tokens * top_k * 4);
    s.total = s.error + align_part(kErrorWords * 4);
    return s;
}

}  // namespace mega_moe::layout
