#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "bench/common/check.h"

namespace mega_moe::bench {

// Memory of the device that is current when it is made.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(std::size_t count) : count_(count) {
        check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "cudaMalloc");
    }
    ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    T* data() const { return data_; }
    std::size_t size() const { return count_; }
    std::size_t bytes() const { return count_ * sizeof(T); }

    // Every byte to `value`; 0xFF makes NaN of any floating-point type. Done when it returns.
    void fill_bytes(int value) {
        check(cudaMemset(data_, value, bytes()), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    std::vector<T> to_host() const {
        std::vector<T> host(count_);
        check(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return host;
    }

  private:
    std::size_t count_;
    T* data_ = nullptr;
};

}  // namespace mega_moe::bench
