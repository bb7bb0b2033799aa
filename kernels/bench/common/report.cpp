#include "bench/common/report.h"

#include <cmath>
#include <cstdio>

namespace mega_moe::bench {
namespace {

std::string quoted(const std::string& value) {
    std::string out = "\"";
    for (const char c : value) {
        if (c == '"' || c == '\\') out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + '"';
}

}  // namespace

Line::Line(const char* kind) : line_(std::string("{\"kind\": ") + quoted(kind)) {}

Line& Line::raw(const char* key, const std::string& value) {
    line_ += ", " + quoted(key) + ": " + value;
    return *this;
}

Line& Line::text(const char* key, const std::string& value) {
    return raw(key, quoted(value));
}

Line& Line::number(const char* key, double value) {
    // JSON has no NaN; a figure that is none must not look like one.
    if (!std::isfinite(value)) return raw(key, "null");
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.6g", value);
    return raw(key, digits);
}

Line& Line::integer(const char* key, std::int64_t value) {
    return raw(key, std::to_string(value));
}

Line& Line::flag(const char* key, bool value) {
    return raw(key, value ? "true" : "false");
}

void Line::print() {
    std::printf("%s}\n", line_.c_str());
    std::fflush(stdout);
}

}  // namespace mega_moe::bench
