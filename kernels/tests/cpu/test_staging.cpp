#include <initializer_list>

#include "cpu/check.h"
#include "layout/staging.h"

namespace {

using mega_moe::layout::kErrorWords;
using mega_moe::layout::kPartAlignment;
using mega_moe::layout::make_staging;

// The layout is part of what Python reads the buffer with, so its values are fixed here and not derived.
static_assert(make_staging(16384, 8, 2048, false).x_sf == 67108864);
static_assert(make_staging(16384, 8, 2048, false).topk_idx == 67108864);
static_assert(make_staging(16384, 8, 2048, true).x_sf == 33554432);
static_assert(make_staging(16384, 8, 2048, true).topk_idx == 34603008);
static_assert(make_staging(16384, 8, 2048, true).topk_weights == 34865152);
static_assert(make_staging(16384, 8, 2048, true).error == 35389440);
static_assert(make_staging(16384, 8, 2048, true).total == 35389696);

}  // namespace

void test_staging() {
    for (const bool quantize : {false, true})
        for (const int tokens : {1, 7, 129, 4096})
            for (const int top_k : {1, 3, 16})
                for (const int hidden : {128, 640, 7168}) {
                    const auto s = make_staging(tokens, top_k, hidden, quantize);
                    const struct {
                        const char* name;
                        std::int64_t start, end, bytes;
                    } parts[] = {
                        {"x", s.x, s.x_sf, std::int64_t{tokens} * hidden * (quantize ? 1 : 2)},
                        {"x_sf", s.x_sf, s.topk_idx, quantize ? std::int64_t{tokens} * hidden / 128 * 4 : 0},
                        {"topk_idx", s.topk_idx, s.topk_weights, std::int64_t{tokens} * top_k * 2},
                        {"topk_weights", s.topk_weights, s.error, std::int64_t{tokens} * top_k * 4},
                        {"error", s.error, s.total, kErrorWords * 4}};
                    for (const auto& part : parts) {
                        CHECK(part.start % kPartAlignment == 0, "%s starts at %lld", part.name,
                              static_cast<long long>(part.start));
                        CHECK(part.end - part.start >= part.bytes, "%s has %lld bytes, want %lld", part.name,
                              static_cast<long long>(part.end - part.start),
                              static_cast<long long>(part.bytes));
                        CHECK(part.end - part.start < part.bytes + kPartAlignment, "%s wastes memory",
                              part.name);
                    }
                }
}
