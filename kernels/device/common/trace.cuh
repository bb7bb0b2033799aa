#pragma once
#include <cstdint>

#include "device/ptx/special_registers.cuh"
#include "layout/trace.h"

namespace mega_moe::device {

using layout::TraceBuffer;
using layout::TraceKind;
using layout::TraceRole;

// One thread's events. The form that is off is empty and costs nothing.
template <bool On>
class Tracer {
  public:
    __device__ __forceinline__ Tracer(const TraceBuffer&, TraceRole, bool) {}
    __device__ __forceinline__ void start() {}
    __device__ __forceinline__ void end(TraceKind, int, int, int) {}
};

template <>
class Tracer<true> {
  public:
    // `writes`: this thread is the one of its role.
    __device__ __forceinline__ Tracer(const TraceBuffer& buffer, TraceRole role, bool writes)
        : left_(writes ? buffer.capacity : 0) {
        constexpr auto kRoles = static_cast<std::int64_t>(TraceRole::kCount);
        next_ = buffer.rows + (std::int64_t{ptx::cta_id()} * kRoles + static_cast<std::int64_t>(role)) *
                                  buffer.capacity * 3;
    }
    __device__ __forceinline__ void start() { start_ = ptx::global_timer(); }
    // Ends an event, and starts the next at the same time.
    __device__ __forceinline__ void end(TraceKind kind, int chunk, int expert, int index) {
        const std::int64_t now = ptx::global_timer();
        if (left_ > 0) {
            next_[0] = layout::trace_code(kind, chunk, expert, index);
            next_[1] = start_;
            next_[2] = now;
            next_ += 3;
            --left_;
        }
        start_ = now;
    }

  private:
    std::int64_t* next_;
    std::int64_t left_;
    std::int64_t start_ = 0;
};

}  // namespace mega_moe::device
