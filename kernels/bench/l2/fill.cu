// How fast TMA fills shared memory from a buffer that stays in L2, with nothing else going on: the ceiling of
// what a GEMM's loads can do. Each block reads every box of its own, or each block of a pair reads half of
// the shared boxes for both.
#include "bench/common/check.h"
#include "bench/common/clock_span.cuh"
#include "bench/common/device_array.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/common/tensor_map.h"
#include "bench/common/timing.h"
#include "bench/groups.h"
#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/tma.cuh"

namespace mega_moe::bench {
namespace {

namespace ptx = device::ptx;

// Fits the half of L2 that is near an SM, too.
constexpr int kBufferRows = 16 << 20 >> 7;
constexpr int kWordsPerRow = 32;

// A stage of OwnBoxes boxes that this block loads for itself and SharedBoxes that the pair shares, of BoxRows
// x 128 bytes.
template <int BoxRows, int OwnBoxes, int SharedBoxes, int Stages>
struct FillConfig {
    static constexpr int kBoxRows = BoxRows;
    static constexpr int kOwnBoxes = OwnBoxes;
    static constexpr int kSharedBoxes = SharedBoxes;
    static constexpr int kStages = Stages;
    static constexpr int kCluster = SharedBoxes > 0 ? 2 : 1;
    static constexpr int kBoxBytes = BoxRows * 128;
    static constexpr int kStageBytes = (OwnBoxes + SharedBoxes) * kBoxBytes;
    static constexpr int kNumBoxes = kBufferRows / BoxRows;
    static constexpr int kSharedBytes = 1024 + Stages * kStageBytes + 16 * Stages;
    // Boxes that leave L2 for one block's stage.
    static constexpr double kReadBoxes = OwnBoxes + SharedBoxes / 2.0;
    static_assert(SharedBoxes % 2 == 0, "each block of the pair loads half");
    static_assert(kSharedBytes <= 232448, "shared memory of a block");
};

struct FillParams {
    layout::TensorMap map;
    int stages;  // that each block fills
    ClockSpan* clock;
    unsigned* mismatches;  // null: contents are not looked at
};

// Boxes of cluster, stage and place within the stage: far apart for neighbours, so that they meet in no slice
// of L2.
template <class C>
__device__ int box_of(int cluster, int stage, int place, int rank) {
    constexpr int kOdd = 2 * (C::kNumBoxes / 5) + 1;
    return (cluster * kOdd + stage * (2 * C::kOwnBoxes + C::kSharedBoxes) + place + rank * C::kOwnBoxes) %
           C::kNumBoxes;
}

// The place of own box i is i, in the order of ranks; shared boxes follow those of both.
template <class C>
__device__ int shared_box_of(int cluster, int stage, int i) {
    return box_of<C>(cluster, stage, 2 * C::kOwnBoxes + i, 0);
}

template <class C>
__device__ void load(const FillParams& p, uint32_t base, uint32_t bars, int cluster, int rank) {
    for (int i = 0; i < p.stages; ++i) {
        const int stage = i % C::kStages;
        const uint32_t full = bars + 16 * stage;
        ptx::mbarrier_wait(full + 8, (i / C::kStages + 1) & 1);
        ptx::mbarrier_arrive_expect(full, C::kStageBytes);
        uint32_t box = base + stage * C::kStageBytes;
        for (int own = 0; own < C::kOwnBoxes; ++own, box += C::kBoxBytes) {
            ptx::tma_load(box, &p.map, full, 0, box_of<C>(cluster, i, own, rank) * C::kBoxRows);
        }
        if constexpr (C::kSharedBoxes > 0) {
            constexpr int kHalf = C::kSharedBoxes / 2;
            for (int shared = rank * kHalf; shared < (rank + 1) * kHalf; ++shared) {
                ptx::tma_multicast(box + shared * C::kBoxBytes, &p.map, full, 3, 0,
                                   shared_box_of<C>(cluster, i, shared) * C::kBoxRows);
            }
        }
    }
}

// The buffer's words count up; the 128-byte swizzle moves 16-byte chunks within their row.
template <class C>
__device__ void compare_stage(const FillParams& p, const uint8_t* stage_data, int cluster, int i, int rank,
                              int lane) {
    unsigned wrong = 0;
    for (int word = lane; word < C::kStageBytes / 4; word += 32) {
        const int place = word / (C::kBoxBytes / 4);
        const int box = place < C::kOwnBoxes ? box_of<C>(cluster, i, place, rank)
                                             : shared_box_of<C>(cluster, i, place - C::kOwnBoxes);
        const int row = word % (C::kBoxBytes / 4) / kWordsPerRow;
        const int column = (word % kWordsPerRow) ^ (row % 8 * 4);
        const uint32_t want = (box * C::kBoxRows + row) * kWordsPerRow + column;
        wrong += reinterpret_cast<const uint32_t*>(stage_data)[word] != want;
    }
    if (wrong != 0) atomicAdd(p.mismatches, wrong);
}

template <class C>
__device__ void consume(const FillParams& p, const uint8_t* data, uint32_t bars, int cluster, int rank,
                        int lane) {
    for (int i = 0; i < p.stages; ++i) {
        const int stage = i % C::kStages;
        ptx::mbarrier_wait(bars + 16 * stage, i / C::kStages & 1);
        if (p.mismatches != nullptr)
            compare_stage<C>(p, data + stage * C::kStageBytes, cluster, i, rank, lane);
        __syncwarp();
        if constexpr (C::kCluster == 1) {
            if (lane == 0) ptx::mbarrier_arrive(bars + 16 * stage + 8);
        } else {
            if (lane < C::kCluster) ptx::mbarrier_arrive_at(bars + 16 * stage + 8, lane);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(64, 1) fill(const __grid_constant__ FillParams p) {
    extern __shared__ uint8_t raw[];
    const uint32_t start = ptx::shared_address(raw);
    const uint32_t base = (start + 1023) & ~1023u;
    const uint32_t bars = base + C::kStages * C::kStageBytes;  // full and empty of each stage
    const bool times = blockIdx.x == 0 && threadIdx.x == 0;
    if (times) start_clock(p.clock);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::kStages; ++stage) {
            ptx::mbarrier_init(bars + 16 * stage, 1);
            ptx::mbarrier_init(bars + 16 * stage + 8, C::kCluster);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();  // a launch without clusters has clusters of one block
    const int cluster = blockIdx.x / C::kCluster;
    const int rank = blockIdx.x % C::kCluster;
    if (threadIdx.x == 0) {
        load<C>(p, base, bars, cluster, rank);
    } else if (threadIdx.x >= 32) {
        consume<C>(p, raw + (base - start), bars, cluster, rank, threadIdx.x - 32);
    }
    __syncwarp();
    ptx::cluster_sync();
    if (times) stop_clock(p.clock);
}

__global__ void count_up(uint32_t* words, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = i;
}

template <class C>
bool measure(const char* name, const DeviceArray<uint32_t>& buffer, ClockSpan* clock) {
    DeviceArray<unsigned> mismatches(1);
    mismatches.fill_bytes(0);
    const int blocks = num_sms() / 2 * 2;
    FillParams p = {};
    p.map = map_rows(buffer.data(), MapElement::kByte, kBufferRows, 128, C::kBoxRows);
    p.clock = clock;
    const LaunchShape shape = {blocks, 64, C::kSharedBytes, C::kCluster, false};
    const auto run = [&] {
        check(launch(reinterpret_cast<const void*>(&fill<C>), shape, &p, nullptr), name);
    };

    p.stages = 4 * C::kStages + 1;
    p.mismatches = mismatches.data();
    run();
    check(cudaDeviceSynchronize(), name);
    const unsigned wrong = mismatches.to_host()[0];
    Line("check").text("variant", name).integer("words_wrong", wrong).flag("ok", wrong == 0).print();
    if (wrong != 0) return false;

    p.mismatches = nullptr;
    p.stages = 8192;
    const Timing timing = time_launches(run, clock);
    const double filled = double(blocks) * p.stages * C::kStageBytes;
    const double read = double(blocks) * p.stages * C::kReadBoxes * C::kBoxBytes;
    Line line("row");
    line.text("measure", "l2")
        .text("variant", name)
        .integer("blocks", blocks)
        .integer("bytes_in_flight", C::kStages * C::kStageBytes)
        .number("burst_read_tb_s", read / timing.burst_us * 1e-6)
        .number("burst_fill_tb_s", filled / timing.burst_us * 1e-6)
        .number("sustained_read_tb_s", read / timing.sustained_us * 1e-6)
        .number("sustained_fill_tb_s", filled / timing.sustained_us * 1e-6)
        .number("read_kb_per_clock", read / (timing.burst_us * timing.burst_mhz) / 1024)
        .number("fill_bytes_per_clock_per_sm", filled / (timing.burst_us * timing.burst_mhz) / blocks);
    timing.add_to(line);
    line.print();
    return true;
}

}  // namespace

bool run_l2() {
    DeviceArray<uint32_t> buffer(std::size_t{kBufferRows} * kWordsPerRow);
    DeviceArray<ClockSpan> clock(1);
    count_up<<<1024, 256>>>(buffer.data(), static_cast<int>(buffer.size()));
    check(cudaDeviceSynchronize(), "count_up");
    bool ok = measure<FillConfig<128, 3, 0, 4>>("128x256 tile", buffer, clock.data());
    ok = measure<FillConfig<128, 1, 2, 4>>("128x256 tile, multicast of 256", buffer, clock.data()) && ok;
    ok = measure<FillConfig<64, 4, 0, 6>>("128x128 tile", buffer, clock.data()) && ok;
    ok = measure<FillConfig<64, 2, 2, 6>>("128x128 tile, multicast of 128", buffer, clock.data()) && ok;
    return measure<FillConfig<128, 0, 2, 6>>("all multicast", buffer, clock.data()) && ok;
}

}  // namespace mega_moe::bench
