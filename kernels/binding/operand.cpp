#include "binding/operand.h"

namespace mega_moe::binding {

void check_operand(const Checker& check, const char* name, const Tensor& tensor,
                   std::initializer_list<ScalarType> dtypes, std::initializer_list<int64_t> sizes) {
    check.dims(name, tensor, static_cast<int64_t>(sizes.size()));
    check.dtype(name, tensor, dtypes);
    int64_t dim = 0;
    for (const int64_t size : sizes)
        check.size(name, tensor, dim++, size);
    check.contiguous(name, tensor);
    check.aligned(name, reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()), 16);
}

}  // namespace mega_moe::binding
