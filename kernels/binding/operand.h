#pragma once
#include <cstdint>
#include <initializer_list>

#include "binding/check.h"

namespace mega_moe::binding {

// Of one of `dtypes` and of these sizes, contiguous, 16-byte aligned.
void check_operand(const Checker& check, const char* name, const Tensor& tensor,
                   std::initializer_list<ScalarType> dtypes, std::initializer_list<int64_t> sizes);

// False for an empty tensor of one dimension: nobody wants this result. A wanted one may be empty too.
bool is_wanted(const Tensor& result);

// Rows of the tensor that carries gate and up from forward to backward, 0 where nobody wants it.
int64_t checked_saved_rows(const Checker& check, const Tensor& saved, int64_t intermediate);

}  // namespace mega_moe::binding
