// Whether launches on different streams that wait for one another run at once on one device, each on its
// share of the SMs: what tests of several ranks on one device stand on.
#include <vector>

#include "bench/common/check.h"
#include "bench/common/device_array.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/launch/launch_parts.h"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/special_registers.cuh"

namespace mega_moe::bench {
namespace {

namespace ptx = device::ptx;

constexpr int kThreads = 384;
constexpr int kMaxLaunches = 8;
constexpr int kWordsApart = 16;          // a cache line of counters each
constexpr int64_t kLimitNs = 200000000;  // no launch that is running takes so long

struct MeetParams {
    uint64_t* arrived;
    uint64_t* next_arrived;  // of the launch that this one waits for
    unsigned long long* met;
};

__global__ void __launch_bounds__(kThreads, 1) meet(const __grid_constant__ MeetParams p) {
    if (threadIdx.x != 0) return;
    ptx::add_release_gpu(p.arrived, 1);
    const int64_t start = ptx::global_timer();
    while (ptx::load_acquire_gpu(p.next_arrived) < gridDim.x) {
        if (ptx::global_timer() - start > kLimitNs) return;
    }
    atomicAdd(p.met, 1ull);
}

bool check_launches(const std::vector<cudaStream_t>& streams, int launches, int cluster, bool cooperative) {
    DeviceArray<uint64_t> words(std::size_t{kMaxLaunches} * kWordsApart);
    words.fill_bytes(0);
    const int blocks = num_sms() / launches / 2 * 2;
    const LaunchShape shape = {blocks, kThreads, max_shared_bytes(), cluster, cooperative};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < launches && error == cudaSuccess; ++i) {
        MeetParams p = {};
        p.arrived = words.data() + i * kWordsApart;
        p.next_arrived = words.data() + (i + 1) % launches * kWordsApart;
        p.met = reinterpret_cast<unsigned long long*>(words.data() + i * kWordsApart + 1);
        error = launch(reinterpret_cast<const void*>(&meet), shape, &p, streams[static_cast<std::size_t>(i)]);
    }
    check(cudaDeviceSynchronize(), "meet");
    const auto host = words.to_host();
    std::uint64_t met = 0;
    for (int i = 0; i < launches; ++i)
        met += host[static_cast<std::size_t>(i * kWordsApart + 1)];
    const bool ok = error == cudaSuccess &&
                    met == static_cast<std::uint64_t>(blocks) * static_cast<std::uint64_t>(launches);
    Line("check")
        .text("variant", "launches that wait for one another")
        .integer("launches", launches)
        .integer("blocks_each", blocks)
        .integer("cluster", cluster)
        .flag("cooperative", cooperative)
        .text("launch", cudaGetErrorName(error))
        .integer("blocks_that_met", static_cast<std::int64_t>(met))
        .flag("ok", ok)
        .print();
    return ok;
}

}  // namespace

bool check_concurrent_launches() {
    std::vector<cudaStream_t> streams(kMaxLaunches);
    for (cudaStream_t& stream : streams) {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    bool ok = true;
    for (const int launches : {2, 4, kMaxLaunches}) {
        for (const int cluster : {1, 2}) {
            for (const bool cooperative : {false, true})
                ok = check_launches(streams, launches, cluster, cooperative) && ok;
        }
    }
    for (const cudaStream_t stream : streams)
        check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return ok;
}

}  // namespace mega_moe::bench
