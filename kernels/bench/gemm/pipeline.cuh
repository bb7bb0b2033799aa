#pragma once
#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_address.cuh"

namespace mega_moe::bench {

namespace ptx = device::ptx;

// Where things lie in a block's shared memory, as shared addresses.
template <class C>
struct SharedMap {
    uint32_t base;
    uint8_t* generic;  // the same place

    __device__ explicit SharedMap(uint8_t* raw) {
        const uint32_t start = ptx::shared_address(raw);
        base = (start + 1023) & ~1023u;
        generic = raw + (base - start);
    }
    __device__ uint32_t a(int stage) const { return base + stage * C::kStageBytes; }
    __device__ uint32_t b(int stage) const { return a(stage) + C::kBytesA; }
    __device__ uint32_t scale(int stage) const { return base + C::kScaleOffset + stage * C::kScaleBytes; }
    __device__ const float* scale_values(int stage) const {
        return reinterpret_cast<const float*>(generic + C::kScaleOffset + stage * C::kScaleBytes);
    }
    __device__ uint32_t store_buffer(int warp, int buffer) const {
        return base + C::kStoreOffset + (warp * C::kStoreBuffers + buffer) * C::kStoreBytes;
    }
    __device__ uint32_t full(int stage) const { return base + C::kBarrierOffset + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
    __device__ uint32_t turn(int warpgroup) const { return full(2 * C::kStages + warpgroup); }

    __device__ void init_barriers() const {
        // One arrival per warp that reads a stage, from both blocks, since each block's loads fill both.
        constexpr int kReaders = (C::kPingPong ? 4 : 8) * C::kClusterSize;
        for (int stage = 0; stage < C::kStages; ++stage) {
            ptx::mbarrier_init(full(stage), 1);
            ptx::mbarrier_init(empty(stage), kReaders);
        }
        ptx::mbarrier_init(turn(0), 4);
        ptx::mbarrier_init(turn(1), 4);
        ptx::fence_mbarrier_init();
    }
};

// Position in the ring of stages, with the parity of the phase that its barriers are in.
template <class C>
struct StageCursor {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void next() {
        if (++stage == C::kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ void skip(int stages) {
        stage += stages;
        parity ^= (stage / C::kStages) & 1;
        stage %= C::kStages;
    }
};

struct TileOrigin {
    int row;
    int column;
};

template <class C>
__device__ __forceinline__ TileOrigin tile_origin(int tile, int num_n_tiles, uint32_t rank) {
    const int m = tile / num_n_tiles;
    const int n = tile - m * num_n_tiles;
    return {(m * C::kClusterSize + static_cast<int>(rank)) * C::kBlockM, n * C::kBlockN};
}

template <class C>
__device__ __forceinline__ void sync_cluster_or_block() {
    if constexpr (C::kClusterSize > 1) {
        ptx::cluster_sync();
    } else {
        __syncthreads();
    }
}

}  // namespace mega_moe::bench
