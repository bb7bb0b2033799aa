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

bool is_wanted(const Tensor& result) {
    return result.dim() != 1 || result.size(0) != 0;
}

int64_t checked_saved_rows(const Checker& check, const Tensor& saved, int64_t intermediate) {
    if (!is_wanted(saved)) return 0;
    check.dims("saved_gate_up", saved, 2);
    const int64_t rows = saved.size(0);
    check_operand(check, "saved_gate_up", saved, {ScalarType::BFloat16}, {rows, 2 * intermediate});
    check.range("rows of saved_gate_up", rows, 0, INT32_MAX);
    check.multiple("rows of saved_gate_up", rows, 128);
    return rows;
}

}  // namespace mega_moe::binding
