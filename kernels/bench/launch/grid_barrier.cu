// Whether the launch that the kernels need is accepted, a cooperative one of clusters with all shared memory,
// and what a barrier over its grid costs.
#include "bench/common/check.h"
#include "bench/common/clock_span.cuh"
#include "bench/common/device_array.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/common/timing.h"
#include "bench/launch/launch_parts.h"
#include "device/ptx/ordered_memory.cuh"

namespace mega_moe::bench {
namespace {

namespace ptx = device::ptx;

constexpr int kThreads = 384;

struct BarrierParams {
    uint64_t* arrived;  // counts on over all barriers of all launches
    uint32_t* seen;     // one word per block; null: not checked
    uint32_t* stale;
    uint64_t start;  // of `arrived`, before this launch
    int barriers;
    ClockSpan* clock;
};

__device__ void grid_barrier(const BarrierParams& p, int number) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint64_t target = p.start + static_cast<uint64_t>(number + 1) * gridDim.x;
        ptx::add_release_gpu(p.arrived, 1);
        while (ptx::load_acquire_gpu(p.arrived) < target) {
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1) barrier_loop(const __grid_constant__ BarrierParams p) {
    const bool times = blockIdx.x == 0 && threadIdx.x == 0;
    if (times) start_clock(p.clock);
    for (int i = 0; i < p.barriers; ++i) {
        if (p.seen != nullptr && threadIdx.x == 0) p.seen[blockIdx.x] = static_cast<uint32_t>(i + 1);
        grid_barrier(p, i);
        if (p.seen != nullptr && threadIdx.x == 0) {
            const uint32_t neighbour =
                *reinterpret_cast<volatile uint32_t*>(p.seen + (blockIdx.x + 1) % gridDim.x);
            if (neighbour < static_cast<uint32_t>(i + 1)) atomicAdd(p.stale, 1u);
        }
    }
    if (times) stop_clock(p.clock);
}

bool measure(int blocks, int cluster, ClockSpan* clock) {
    DeviceArray<uint64_t> arrived(1);
    DeviceArray<uint32_t> stale(1);
    DeviceArray<uint32_t> seen(static_cast<std::size_t>(blocks));
    arrived.fill_bytes(0);
    stale.fill_bytes(0);
    seen.fill_bytes(0);
    BarrierParams p = {};
    p.arrived = arrived.data();
    p.stale = stale.data();
    p.clock = clock;
    const LaunchShape shape = {blocks, kThreads, max_shared_bytes(), cluster, true};
    const void* kernel = reinterpret_cast<const void*>(&barrier_loop);
    const auto run = [&](int barriers) {
        p.barriers = barriers;
        const cudaError_t error = launch(kernel, shape, &p, nullptr);
        p.start += static_cast<uint64_t>(barriers) * static_cast<uint64_t>(blocks);
        return error;
    };

    p.seen = seen.data();
    const cudaError_t error = run(1000);
    if (error == cudaSuccess) check(cudaDeviceSynchronize(), "barrier_loop");
    const uint32_t stale_reads = stale.to_host()[0];
    const bool ok = error == cudaSuccess && stale_reads == 0;
    Line("check")
        .text("variant", "cooperative launch, grid barrier")
        .integer("blocks", blocks)
        .integer("cluster", cluster)
        .integer("shared_bytes", shape.shared_bytes)
        .text("launch", cudaGetErrorName(error))
        .integer("stale_reads", stale_reads)
        .flag("ok", ok)
        .print();
    if (!ok) return false;

    p.seen = nullptr;
    const auto time = [&](int barriers) {
        return time_launches([&] { check(run(barriers), "barrier_loop"); }, clock, {50, 5, 20});
    };
    // What launching costs is in both and falls out.
    constexpr int kFew = 1000;
    constexpr int kMany = 3000;
    const Timing few = time(kFew);
    Timing many = time(kMany);
    many.burst_us = (many.burst_us - few.burst_us) / (kMany - kFew);
    many.sustained_us = (many.sustained_us - few.sustained_us) / (kMany - kFew);
    Line line("row");
    line.text("measure", "grid barrier").integer("blocks", blocks).integer("cluster", cluster);
    many.add_to(line);
    line.print();
    return true;
}

}  // namespace

bool measure_grid_barriers() {
    DeviceArray<ClockSpan> clock(1);
    const int all = num_sms() / 2 * 2;
    bool ok = true;
    for (const int cluster : {1, 2}) {
        for (const int blocks : {all, all - 2, all - 16})
            ok = measure(blocks, cluster, clock.data()) && ok;
    }
    return ok;
}

}  // namespace mega_moe::bench
