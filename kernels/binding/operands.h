#pragma once
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "binding/check.h"

namespace mega_moe::binding {

using MaybeTensor = std::optional<Tensor>;
using Dtypes = std::initializer_list<ScalarType>;
using Sizes = std::initializer_list<int64_t>;

// What a kernel loads by the element, as routing does.
constexpr int64_t kByElement = 1;
// What a kernel loads by 16 bytes or through TMA.
constexpr int64_t kByVector = 16;

// Checks an operator's tensors and hands out their addresses: contiguous, aligned, of these sizes.
// Devices are checked apart, last, so that a machine without a GPU can test every other check.
class Operands {
  public:
    explicit Operands(const Checker& check) : check_(check) {}

    const void* input(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes,
                      int64_t alignment = kByVector);
    // Given exactly where it is `wanted`, for the reason `where`; null else.
    const void* input(const char* name, const MaybeTensor& tensor, Dtypes dtypes, Sizes sizes, bool wanted,
                      const char* where);
    void* result(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes,
                 int64_t alignment = kByVector);
    // Null where nobody wants it.
    void* result(const char* name, const MaybeTensor& tensor, Dtypes dtypes, Sizes sizes);
    void on_device_of(const Tensor& reference) const;

  private:
    void check(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes, int64_t alignment);

    const Checker& check_;
    std::vector<std::pair<const char*, Tensor>> seen_;
};

}  // namespace mega_moe::binding
