#pragma once
#include <algorithm>
#include <cstdint>

#include "emulate/cuda.h"

// Stands in for the PTX of the same name: one OS thread sees memory in order. Polls let the other threads
// run.
namespace mega_moe::device::ptx {

inline uint64_t load_acquire_sys(const uint64_t* address) {
    emulate::yield();
    return *address;
}
inline uint64_t load_acquire_gpu(const uint64_t* address) {
    return load_acquire_sys(address);
}
inline uint64_t load_relaxed_sys(const uint64_t* address) {
    return *address;
}
inline uint32_t load_relaxed_gpu(const uint32_t* address) {
    return *address;
}
inline uint32_t load_relaxed_sys(const uint32_t* address) {
    return *address;
}
inline uint16_t load_relaxed_sys(const uint16_t* address) {
    return *address;
}
inline uint4 load_relaxed_sys(const uint4* address) {
    return *address;
}
inline void store_relaxed_sys(uint64_t* address, uint64_t v) {
    *address = v;
}
inline void store_release_sys(uint64_t* address, uint64_t v) {
    *address = v;
}
inline void add_relaxed_gpu(uint32_t* address, uint32_t v) {
    *address += v;
}
inline void add_release_gpu(uint64_t* address, uint64_t v) {
    *address += v;
}
inline uint64_t max_relaxed_gpu(uint64_t* address, uint64_t v) {
    const uint64_t old = *address;
    *address = std::max(old, v);
    return old;
}
inline void fence_sys() {}

}  // namespace mega_moe::device::ptx
