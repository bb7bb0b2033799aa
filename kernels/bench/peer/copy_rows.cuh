#pragma once
#include "bench/common/clock_span.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_address.cuh"

namespace mega_moe::bench {

namespace ptx = device::ptx;

inline constexpr int kMaxCopyWarps = 16;
inline constexpr int kMaxCopyBuffers = 4;

// Rows in a scattered order: `num_rows` is a power of two.
__host__ __device__ inline uint32_t scattered_row(uint32_t row, uint32_t num_rows) {
    return row * 40503u & (num_rows - 1);
}

// Row i of `destination` is row scattered(i) of `source`, or the other way round when `scatter` is set.
struct RowCopy {
    const uint8_t* source;
    uint8_t* destination;
    bool scatter;
};

struct CopyParams {
    RowCopy copies[2];
    int num_copies;  // with two, every other warp works for the second
    uint32_t num_rows;
    uint32_t row_bytes;
    int buffers;  // of one row, per warp
    ClockSpan* clock;
};

// One thread moves rows through a ring of buffers: as many loads in flight, and a store from each as its row
// lands.
__device__ inline void copy_rows(const RowCopy& copy, const CopyParams& p, uint32_t first, uint32_t step,
                                 uint32_t data, uint32_t bars) {
    const auto offset = [&](uint32_t row, bool scattered) {
        return static_cast<uint64_t>(scattered ? scattered_row(row, p.num_rows) : row) * p.row_bytes;
    };
    const auto load = [&](uint32_t row, int buffer) {
        ptx::mbarrier_arrive_expect(bars + 8 * buffer, p.row_bytes);
        ptx::bulk_load(data + buffer * p.row_bytes, copy.source + offset(row, !copy.scatter), p.row_bytes,
                       bars + 8 * buffer);
    };
    uint32_t to_load = first;
    for (int buffer = 0; buffer < p.buffers && to_load < p.num_rows; ++buffer, to_load += step)
        load(to_load, buffer);
    int buffer = 0;
    uint32_t parity = 0;
    for (uint32_t row = first; row < p.num_rows; row += step) {
        ptx::mbarrier_wait(bars + 8 * buffer, parity);
        ptx::bulk_store(copy.destination + offset(row, copy.scatter), data + buffer * p.row_bytes,
                        p.row_bytes);
        ptx::bulk_commit();
        if (to_load < p.num_rows) {
            ptx::bulk_wait_read<0>();
            load(to_load, buffer);
            to_load += step;
        }
        if (++buffer == p.buffers) {
            buffer = 0;
            parity ^= 1;
        }
    }
    ptx::bulk_wait<0>();
}

__global__ void __launch_bounds__(32 * kMaxCopyWarps, 1) copy_rows_kernel(
    const __grid_constant__ CopyParams p) {
    extern __shared__ __align__(128) uint8_t raw[];
    __shared__ __align__(8) uint64_t barriers[kMaxCopyWarps * kMaxCopyBuffers];
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    const bool times = blockIdx.x == 0 && threadIdx.x == 0;
    if (times) start_clock(p.clock);
    if (threadIdx.x == 0) {
        for (uint64_t& barrier : barriers)
            ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        const int worker = blockIdx.x * warps + warp;
        const int workers = gridDim.x * warps;
        copy_rows(p.copies[worker % p.num_copies], p, worker / p.num_copies, workers / p.num_copies,
                  ptx::shared_address(raw) + warp * p.buffers * p.row_bytes,
                  ptx::shared_address(&barriers[warp * kMaxCopyBuffers]));
    }
    __syncthreads();
    if (times) stop_clock(p.clock);
}

}  // namespace mega_moe::bench
