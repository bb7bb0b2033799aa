#include "binding/check.h"

#include <stdexcept>

namespace mega_moe::binding {
namespace {

std::string shape_text(const Tensor& tensor) {
    std::string text = "[";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        if (dim > 0) text += ", ";
        text += std::to_string(tensor.size(dim));
    }
    return text + "]";
}

// The name that Python shows, for the types a caller may pass by mistake; any other by its number.
std::string dtype_text(ScalarType type) {
    switch (type) {
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Half:
            return "float16";
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Float8_e4m3fn:
            return "float8_e4m3fn";
        case ScalarType::Short:
            return "int16";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        default:
            return "ScalarType " + std::to_string(static_cast<int>(type));
    }
}

std::string device_text(const Tensor& tensor) {
    if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
    return tensor.is_cpu() ? "cpu" : "neither cpu nor cuda";
}

}  // namespace

void Checker::fail(const std::string& text) const {
    throw std::runtime_error(std::string(op_) + ": " + text);
}

void Checker::dims(const char* name, const Tensor& tensor, int64_t want) const {
    if (tensor.dim() == want) return;
    fail(std::string(name) + ": shape is " + shape_text(tensor) + ", must have " + std::to_string(want) +
         " dimensions");
}

void Checker::dtype(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> want) const {
    const ScalarType got = tensor.scalar_type();
    std::string wanted;
    for (const ScalarType type : want) {
        if (got == type) return;
        wanted += (wanted.empty() ? "" : " or ") + dtype_text(type);
    }
    fail(std::string(name) + ": dtype is " + dtype_text(got) + ", must be " + wanted);
}

void Checker::size(const char* name, const Tensor& tensor, int64_t dim, int64_t want) const {
    if (tensor.size(dim) == want) return;
    fail(std::string(name) + ": shape is " + shape_text(tensor) + ", dimension " + std::to_string(dim) +
         " must be " + std::to_string(want));
}

void Checker::contiguous(const char* name, const Tensor& tensor) const {
    if (tensor.is_contiguous()) return;
    std::string strides = "[";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        if (dim > 0) strides += ", ";
        strides += std::to_string(tensor.stride(dim));
    }
    fail(std::string(name) + ": strides are " + strides + "] for shape " + shape_text(tensor) +
         ", must be contiguous");
}

void Checker::cuda(const char* name, const Tensor& tensor) const {
    if (tensor.is_cuda()) return;
    fail(std::string(name) + ": device is " + device_text(tensor) + ", must be cuda");
}

void Checker::same_device(const char* name, const Tensor& tensor, const Tensor& reference) const {
    if (device_text(tensor) == device_text(reference)) return;
    fail(std::string(name) + ": device is " + device_text(tensor) + ", must be " + device_text(reference));
}

void Checker::aligned(const char* name, std::uintptr_t address, int64_t bytes) const {
    const auto offset = static_cast<int64_t>(address % static_cast<std::uintptr_t>(bytes));
    if (offset == 0) return;
    fail(std::string(name) + ": address is " + std::to_string(offset) + " past a multiple of " +
         std::to_string(bytes) + " bytes, must be aligned to it");
}

void Checker::range(const char* name, int64_t got, int64_t low, int64_t high) const {
    if (low <= got && got <= high) return;
    fail(std::string(name) + " is " + std::to_string(got) + ", must be " + std::to_string(low) + " to " +
         std::to_string(high));
}

void Checker::multiple(const char* name, int64_t got, int64_t factor) const {
    if (got % factor == 0) return;
    fail(std::string(name) + " is " + std::to_string(got) + ", must be a multiple of " +
         std::to_string(factor));
}

}  // namespace mega_moe::binding
