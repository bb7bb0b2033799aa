#pragma once
#include <cstddef>
#include <cstdint>

#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_address.cuh"
#include "layout/layer_shared.h"
#include "layout/scale_rounding.h"

// What the roles that know no tensor core keep in a CTA's shared memory: buffers of dispatch, records of
// tiles, the words passed between the CTAs of a cluster, and what a launch begins with.
namespace mega_moe::device {

// Byte offsets from a multiple of 1024 on.
struct RoleSmemOffsets {
    int pull;         // [kPullBuffers][kPullBytes]
    int pull_scales;  // [kPullBuffers] scale factors of those rows, where they travel as e4m3; so has pieces
    int pieces;       // [layout::kPullPieces]
    int ring;         // records [layout::kTileRing]
    int mailbox;      // uint32 [layout::kMailbox]
    int role_barriers;  // of full and empty records, of the mailbox, of pull buffers
    int epoch;          // uint64
    int state;          // two words
};

// As shared addresses. C: kAt, which has these offsets; kRing, kPullBuffers, kPullBytes.
template <class C>
struct RoleSmem {
    std::uint32_t base;
    std::byte* generic;  // the same place

    __device__ __forceinline__ explicit RoleSmem(std::byte* raw) {
        const std::uint32_t start = ptx::shared_address(raw);
        base = (start + 1023) & ~1023u;
        generic = raw + (base - start);
    }
    __device__ __forceinline__ std::uint32_t pull_buffer(int i) const {
        return base + C::kAt.pull + i * C::kPullBytes;
    }
    __device__ __forceinline__ std::uint32_t pull_scales(int buffer) const {
        return base + C::kAt.pull_scales + buffer * (C::kPullBytes / layout::kQuantGroup * 4);
    }
    __device__ __forceinline__ std::uint32_t* piece(int i) const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.pieces + i * layout::kPullPieceBytes);
    }
    __device__ __forceinline__ std::byte* record(int i) const {
        return generic + C::kAt.ring + i * layout::kTileRecordBytes;
    }
    __device__ __forceinline__ std::uint32_t role_barrier(int i) const {
        return base + C::kAt.role_barriers + 8 * i;
    }
    __device__ __forceinline__ std::uint32_t ring_full(int i) const { return role_barrier(i); }
    __device__ __forceinline__ std::uint32_t ring_empty(int i) const { return role_barrier(C::kRing + i); }
    __device__ __forceinline__ std::uint32_t mailbox_barrier(int i) const {
        return role_barrier(2 * C::kRing + i);
    }
    __device__ __forceinline__ std::uint32_t pulled(int i) const {
        return mailbox_barrier(layout::kMailbox + i);
    }
    __device__ __forceinline__ std::uint32_t mailbox_word(int i) const {
        return base + C::kAt.mailbox + 4 * i;
    }
    __device__ __forceinline__ std::uint32_t* mailbox_value(int i) const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.mailbox) + i;
    }
    // Words by which the CTAs of a cluster signal each other that they have the tables.
    __device__ __forceinline__ std::uint32_t state_address(int i) const {
        return base + C::kAt.state + 4 * i;
    }
    __device__ __forceinline__ std::uint32_t* state() const {
        return reinterpret_cast<std::uint32_t*>(generic + C::kAt.state);
    }
    // Number of the launch.
    __device__ __forceinline__ std::uint64_t* epoch() const {
        return reinterpret_cast<std::uint64_t*>(generic + C::kAt.epoch);
    }

    // A record is released by so many warps.
    __device__ __forceinline__ void init_role_barriers(int readers) const {
        for (int i = 0; i < C::kRing; ++i) {
            ptx::mbarrier_init(ring_full(i), 1);
            ptx::mbarrier_init(ring_empty(i), static_cast<std::uint32_t>(readers));
        }
        for (int i = 0; i < layout::kMailbox; ++i)
            ptx::mbarrier_init(mailbox_barrier(i), 1);
        for (int i = 0; i < C::kPullBuffers; ++i)
            ptx::mbarrier_init(pulled(i), 1);
    }
};

}  // namespace mega_moe::device
