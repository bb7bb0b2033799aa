#pragma once
#include <cstdint>
#include <string>

namespace mega_moe::bench {

// One JSON object on a line of standard output, which run.py collects. Kinds:
//   row    a measurement
//   check  whether results were right, with the figures it was judged by; `ok` decides
//   skip   why something was not run
class Line {
  public:
    explicit Line(const char* kind);
    Line& text(const char* key, const std::string& value);
    Line& number(const char* key, double value);
    Line& integer(const char* key, std::int64_t value);
    Line& flag(const char* key, bool value);
    void print();

  private:
    Line& raw(const char* key, const std::string& value);
    std::string line_;
};

}  // namespace mega_moe::bench
