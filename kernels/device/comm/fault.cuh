#pragma once
#include <cstdint>

#include "device/ptx/ordered_memory.cuh"
#include "layout/endpoint.h"
#include "layout/record.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"

// How a kernel reports a fault: no trap, which would take the context, and no printf, which would cost
// registers.
namespace mega_moe::device {

using layout::Kind;
using layout::Role;

struct Fault {
    Role role;
    Kind kind;
    std::uint64_t index;
    std::uint64_t seen;
    std::uint64_t wanted;
};

__device__ __forceinline__ std::uint64_t abort_word(const layout::Endpoint& e) {
    return ptx::load_relaxed_sys(e.control + layout::kAbortWord);
}

// The first fault of a launch is kept, and not over one that the host has not read.
__device__ __forceinline__ void write_record(const layout::Endpoint& e, std::uint64_t epoch,
                                             const Fault& fault) {
    if (ptx::max_relaxed_gpu(e.sync + layout::kRecordEpochWord, epoch) >= epoch) return;
    if (ptx::load_relaxed_sys(e.record + layout::kRecordState) != 0) return;
    const auto put = [&](int word, std::uint64_t v) { ptx::store_relaxed_sys(e.record + word, v); };
    put(layout::kRecordRank, static_cast<std::uint64_t>(e.rank));
    put(layout::kRecordRole, static_cast<std::uint64_t>(fault.role));
    put(layout::kRecordKind, static_cast<std::uint64_t>(fault.kind));
    put(layout::kRecordIndex, fault.index);
    put(layout::kRecordSeen, fault.seen);
    put(layout::kRecordWanted, fault.wanted);
    put(layout::kRecordEpoch, epoch);
    ptx::store_release_sys(e.record + layout::kRecordState, 1);
}

// A wait that timed out or was aborted: recorded, and sent to all ranks unless one of them reported
// it first.
__device__ __forceinline__ void give_up(const layout::Endpoint& e, std::uint64_t epoch, Fault fault) {
    const std::uint64_t aborted = abort_word(e);
    const std::uint64_t word =
        layout::encode_abort(static_cast<std::uint64_t>(e.rank), fault.role, fault.kind, fault.index);
    if (aborted != 0) fault = {fault.role, Kind::kAborted, fault.index, aborted, 0};
    write_record(e, epoch, fault);
    if (aborted != 0) return;
#pragma unroll 1
    for (int peer = 0; peer < e.num_ranks; ++peer)
        ptx::store_relaxed_sys(e.at<std::uint64_t>(peer, e.control_offset) + layout::kAbortWord, word);
}

}  // namespace mega_moe::device
