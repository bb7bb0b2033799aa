#pragma once
#include <cstdint>

#include "device/common/ring_cursor.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/warp.cuh"

namespace mega_moe::device {

// Words that the first CTA of a cluster sends to the second, one warp of each.
template <class C>
class ClusterMailbox {
  public:
    __device__ __forceinline__ explicit ClusterMailbox(const typename C::Smem& shared) : shared_(shared) {}

    __device__ __forceinline__ void send(std::uint32_t word) {
        if (ptx::lane_id() == 0)
            ptx::send_shared_at(shared_.mailbox_word(mail_.at), shared_.mailbox_barrier(mail_.at), 1, word);
        mail_.next();
    }
    __device__ __forceinline__ std::uint32_t receive() {
        std::uint32_t word = 0;
        if (ptx::lane_id() == 0) {
            ptx::mbarrier_arrive_expect(shared_.mailbox_barrier(mail_.at), 4);
            ptx::mbarrier_wait(shared_.mailbox_barrier(mail_.at), mail_.parity);
            word = *static_cast<volatile std::uint32_t*>(shared_.mailbox_value(mail_.at));
        }
        mail_.next();
        return ptx::from_lane(word, 0);
    }

  private:
    const typename C::Smem& shared_;
    RingCursor<layout::kMailbox> mail_;
};

}  // namespace mega_moe::device
