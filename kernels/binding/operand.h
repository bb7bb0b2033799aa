#pragma once
#include <cstdint>
#include <initializer_list>

#include "binding/check.h"

namespace mega_moe::binding {

// Of one of `dtypes` and of these sizes, contiguous, 16-byte aligned.
void check_operand(const Checker& check, const char* name, const Tensor& tensor,
                   std::initializer_list<ScalarType> dtypes, std::initializer_list<int64_t> sizes);

}  // namespace mega_moe::binding
