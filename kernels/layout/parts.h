#pragma once
#include <cstdint>

namespace mega_moe::layout {

inline constexpr std::int64_t kPartAlignment =
    256;  // a bulk copy of any part starts on a full L2 sector group

constexpr std::int64_t align_part(std::int64_t bytes) {
    return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

// One part of a buffer: where it starts and how many bytes its owner may touch.
struct Part {
    const char* name;
    std::int64_t offset;
    std::int64_t bytes;
};

// Bytes between parts, and before the first, that nothing may write. Only a debug form of a layout has them.
inline constexpr std::int64_t kCanaryBytes = 256;

template <int Count>
struct Layout {
    Part parts[Count];
    std::int64_t total;

    constexpr std::int64_t operator[](int part) const { return parts[part].offset; }
};

// Lays parts out one after another, in the order of the enumeration that names them.
template <int Count>
class LayoutBuilder {
  public:
    constexpr explicit LayoutBuilder(bool canaries) : gap_(canaries ? kCanaryBytes : 0), next_(gap_) {}

    constexpr void add(const char* name, std::int64_t bytes) {
        layout_.parts[count_++] = {name, next_, bytes};
        next_ += align_part(bytes) + gap_;
    }

    constexpr Layout<Count> finish() {
        layout_.total = next_;
        return layout_;
    }

  private:
    std::int64_t gap_;
    std::int64_t next_;
    Layout<Count> layout_{};
    int count_ = 0;
};

}  // namespace mega_moe::layout
