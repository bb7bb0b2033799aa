#pragma once
#include <cstddef>
#include <cstdint>

#include "layout/routing.h"

namespace mega_moe::layout {

// How the kernels of a rank reach the other ranks, and how long they wait for them.
struct Endpoint {
    std::byte* peers[kMaxRanks];  // symmetric buffers by rank; own one included
    std::uint64_t* control;       // own layout::ControlWord
    std::uint64_t* sync;          // own layout::SyncWord
    std::uint64_t* record;        // pinned host memory, layout::RecordWord
    std::int64_t control_offset;  // of the control words in each symmetric buffer
    std::int64_t arrival_ns;      // limit for a rank that has not launched
    std::int64_t progress_ns;     // limit for everything after that
    std::int32_t rank;
    std::int32_t num_ranks;

    template <class T>
    MEGA_MOE_HD_CONSTEXPR T* at(std::int64_t peer, std::int64_t offset) const {
        return reinterpret_cast<T*>(peers[peer] + offset);
    }
};

}  // namespace mega_moe::layout
