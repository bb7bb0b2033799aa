#pragma once
#include "device/common/ring_cursor.cuh"
#include "layout/layer_shared.h"

namespace mega_moe::device {

// A record, once it is there.
template <class Record, class Smem, int Ring>
__device__ __forceinline__ Record await_record(const Smem& shared, const RingCursor<Ring>& ring) {
    static_assert(sizeof(Record) <= layout::kTileRecordBytes);
    ptx::mbarrier_wait(shared.ring_full(ring.at), ring.parity);
    return *reinterpret_cast<const Record*>(shared.record(ring.at));
}

}  // namespace mega_moe::device
