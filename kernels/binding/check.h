#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>

// Checks of an op's arguments. Each throws std::runtime_error (RuntimeError in Python) that says
// "<op>: <name>: <property> is <got>, must be <want>".
namespace mega_moe::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

class Checker {
  public:
    explicit Checker(const char* op) : op_(op) {}

    void dims(const char* name, const Tensor& tensor, int64_t want) const;
    void dtype(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> want) const;
    void size(const char* name, const Tensor& tensor, int64_t dim, int64_t want) const;
    void contiguous(const char* name, const Tensor& tensor) const;
    void cuda(const char* name, const Tensor& tensor) const;
    void same_device(const char* name, const Tensor& tensor, const Tensor& reference) const;
    void aligned(const char* name, std::uintptr_t address, int64_t bytes) const;
    void range(const char* name, int64_t got, int64_t low, int64_t high) const;
    void multiple(const char* name, int64_t got, int64_t factor) const;
    [[noreturn]] void fail(const std::string& text) const;

  private:
    const char* op_;
};

}  // namespace mega_moe::binding
