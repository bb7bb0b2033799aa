#include "binding/operands.h"

namespace mega_moe::binding {

void Operands::check(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes, int64_t alignment) {
    check_.dims(name, tensor, static_cast<int64_t>(sizes.size()));
    check_.dtype(name, tensor, dtypes);
    int64_t dim = 0;
    for (const int64_t size : sizes)
        check_.size(name, tensor, dim++, size);
    check_.contiguous(name, tensor);
    check_.aligned(name, reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()), alignment);
    seen_.emplace_back(name, tensor);
}

const void* Operands::input(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes,
                            int64_t alignment) {
    check(name, tensor, dtypes, sizes, alignment);
    return tensor.const_data_ptr();
}

const void* Operands::input(const char* name, const MaybeTensor& tensor, Dtypes dtypes, Sizes sizes,
                            bool wanted, const char* where) {
    if (tensor.has_value() != wanted)
        check_.fail(std::string(name) +
                    (wanted ? " is None, must be a tensor where " : " is a tensor, must be None but where ") +
                    where);
    return wanted ? input(name, *tensor, dtypes, sizes) : nullptr;
}

void* Operands::result(const char* name, const Tensor& tensor, Dtypes dtypes, Sizes sizes,
                       int64_t alignment) {
    check(name, tensor, dtypes, sizes, alignment);
    return tensor.mutable_data_ptr();
}

void* Operands::result(const char* name, const MaybeTensor& tensor, Dtypes dtypes, Sizes sizes) {
    return tensor.has_value() ? result(name, *tensor, dtypes, sizes) : nullptr;
}

void Operands::on_device_of(const Tensor& reference) const {
    for (const auto& [name, tensor] : seen_)
        check_.same_device(name, tensor, reference);
}

}  // namespace mega_moe::binding
