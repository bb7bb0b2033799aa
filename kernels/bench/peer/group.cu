// Rows moved by bulk copies, against the number of SMs and the bytes that each keeps in flight: within one
// device, and between two, pulled (the loads cross the link) and pushed (the stores do).
#include <memory>
#include <string>
#include <vector>

#include "bench/common/check.h"
#include "bench/common/device_array.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/common/timing.h"
#include "bench/groups.h"
#include "bench/peer/copy_rows.cuh"
#include "bench/peer/devices.h"

namespace mega_moe::bench {
namespace {

constexpr std::size_t kMaxBytes = 256 << 20;

__host__ __device__ uint32_t word_value(uint32_t device, uint64_t index) {
    return static_cast<uint32_t>(index) * 2654435761u + device;
}

__global__ void write_words(uint32_t* out, uint64_t words, uint32_t device) {
    for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        out[i] = word_value(device, i);
    }
}

__global__ void count_wrong(const uint32_t* copied, uint32_t num_rows, uint32_t row_words, bool scatter,
                            uint32_t source_device, unsigned long long* wrong) {
    for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const uint64_t scattered = scattered_row(row, num_rows);
        const uint64_t from = (scatter ? row : scattered) * row_words;
        const uint64_t to = (scatter ? scattered : row) * row_words;
        for (uint32_t i = threadIdx.x; i < row_words; i += blockDim.x) {
            if (copied[to + i] != word_value(source_device, from + i)) atomicAdd(wrong, 1ull);
        }
    }
}

struct Device {
    explicit Device(int number)
        : index(number), source(kMaxBytes), pulled(kMaxBytes), inbox(kMaxBytes), wrong(1), clock(1) {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        write_words<<<1024, 256>>>(reinterpret_cast<uint32_t*>(source.data()), kMaxBytes / 4,
                                   static_cast<uint32_t>(index));
        check(cudaDeviceSynchronize(), "write_words");
    }
    ~Device() { static_cast<void>(cudaStreamDestroy(stream)); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    int index;
    DeviceArray<uint8_t> source;
    DeviceArray<uint8_t> pulled;
    DeviceArray<uint8_t> inbox;  // what others push
    DeviceArray<unsigned long long> wrong;
    DeviceArray<ClockSpan> clock;
    cudaStream_t stream = nullptr;
};

using Devices = std::vector<std::unique_ptr<Device>>;

struct Pattern {
    const char* name;
    bool pulls;
    bool pushes;
    std::size_t active;  // devices that copy at the same time
};

struct Point {
    int blocks;
    int warps;
    int buffers;
    uint32_t row_bytes;

    int bytes_in_flight() const { return warps * buffers * static_cast<int>(row_bytes); }
    // So many that a launch takes about a millisecond, whatever the number of SMs.
    uint32_t num_rows() const {
        std::size_t bytes = kMaxBytes;
        while (bytes > static_cast<std::size_t>(blocks) << 23)
            bytes /= 2;
        return static_cast<uint32_t>(bytes / row_bytes);
    }
};

CopyParams params(Device& own, Device& other, const Pattern& pattern, const Point& point) {
    CopyParams p = {};
    if (pattern.pulls) p.copies[p.num_copies++] = {other.source.data(), own.pulled.data(), false};
    if (pattern.pushes) p.copies[p.num_copies++] = {own.source.data(), other.inbox.data(), true};
    p.num_rows = point.num_rows();
    p.row_bytes = point.row_bytes;
    p.buffers = point.buffers;
    p.clock = own.clock.data();
    return p;
}

std::int64_t words_wrong(Device& holder, Device& origin, bool pushed, const Point& point) {
    check(cudaSetDevice(holder.index), "cudaSetDevice");
    holder.wrong.fill_bytes(0);
    const auto* words =
        reinterpret_cast<const uint32_t*>(pushed ? holder.inbox.data() : holder.pulled.data());
    count_wrong<<<1024, 256>>>(words, point.num_rows(), point.row_bytes / 4, pushed,
                               static_cast<uint32_t>(origin.index), holder.wrong.data());
    check(cudaDeviceSynchronize(), "count_wrong");
    return static_cast<std::int64_t>(holder.wrong.to_host()[0]);
}

Line line_for(const char* kind, const Pattern& pattern, const Point& point) {
    Line line(kind);
    line.text("measure", "copy")
        .text("variant", pattern.name)
        .integer("blocks", point.blocks)
        .integer("warps", point.warps)
        .integer("buffers", point.buffers)
        .integer("row_bytes", point.row_bytes)
        .integer("bytes_in_flight_per_sm", point.bytes_in_flight());
    return line;
}

bool measure(Devices& devices, const Pattern& pattern, const Point& point) {
    std::vector<CopyParams> all;
    std::vector<TimedLaunch> launches;
    const LaunchShape shape = {point.blocks, 32 * point.warps, point.bytes_in_flight(), 1, false};
    for (std::size_t i = 0; i < pattern.active; ++i) {
        all.push_back(params(*devices[i], *devices[devices.size() - 1 - i], pattern, point));
    }
    for (std::size_t i = 0; i < pattern.active; ++i) {
        Device& own = *devices[i];
        CopyParams* p = &all[i];
        const auto run = [&own, p, shape] {
            check(launch(reinterpret_cast<const void*>(&copy_rows_kernel), shape, p, own.stream),
                  "copy_rows");
        };
        launches.push_back({run, own.clock.data(), own.index, own.stream});
    }
    for (auto& device : devices) {
        check(cudaSetDevice(device->index), "cudaSetDevice");
        device->pulled.fill_bytes(0xFF);
        device->inbox.fill_bytes(0xFF);
    }
    for (const TimedLaunch& one : launches) {
        check(cudaSetDevice(one.device), "cudaSetDevice");
        one.launch();
    }
    std::int64_t wrong = 0;
    for (const TimedLaunch& one : launches) {
        check(cudaSetDevice(one.device), "cudaSetDevice");
        check(cudaStreamSynchronize(one.stream), "copy_rows");
    }
    for (std::size_t i = 0; i < pattern.active; ++i) {
        Device& own = *devices[i];
        Device& other = *devices[devices.size() - 1 - i];
        if (pattern.pulls) wrong += words_wrong(own, other, false, point);
        if (pattern.pushes) wrong += words_wrong(other, own, true, point);
    }
    line_for("check", pattern, point).integer("words_wrong", wrong).flag("ok", wrong == 0).print();
    if (wrong != 0) return false;

    const auto timings = time_together(launches, {20, 3, 10});
    const double bytes = double(point.num_rows()) * point.row_bytes;
    for (std::size_t i = 0; i < timings.size(); ++i) {
        Line line = line_for("row", pattern, point);
        line.integer("device", devices[i]->index)
            .number("burst_pull_gb_s", pattern.pulls ? bytes / timings[i].burst_us * 1e-3 : 0.0)
            .number("burst_push_gb_s", pattern.pushes ? bytes / timings[i].burst_us * 1e-3 : 0.0)
            .number("sustained_pull_gb_s", pattern.pulls ? bytes / timings[i].sustained_us * 1e-3 : 0.0)
            .number("sustained_push_gb_s", pattern.pushes ? bytes / timings[i].sustained_us * 1e-3 : 0.0);
        timings[i].add_to(line);
        line.print();
    }
    return true;
}

bool measure_grid(Devices& devices, const Pattern& pattern) {
    bool ok = true;
    const int all = num_sms();
    for (const int blocks : {4, 8, 16, 32, 64, all}) {
        for (const Point& point :
             {Point{blocks, 1, 1, 4096}, Point{blocks, 1, 2, 4096}, Point{blocks, 1, 3, 4096},
              Point{blocks, 2, 2, 4096}, Point{blocks, 2, 4, 4096}, Point{blocks, 4, 4, 4096},
              Point{blocks, 10, 4, 4096}}) {
            ok = measure(devices, pattern, point) && ok;
        }
    }
    // Rows of other lengths with equally many bytes in flight.
    for (const int row_bytes : {2048, 8192}) {
        const int warps = 32768 / (kMaxCopyBuffers * row_bytes);
        for (const int blocks : {16, all}) {
            const Point point = {blocks, warps, kMaxCopyBuffers, static_cast<uint32_t>(row_bytes)};
            ok = measure(devices, pattern, point) && ok;
        }
    }
    return ok;
}

}  // namespace

bool run_peer() {
    const std::string unconnected = connect_two_devices();
    Devices devices;
    for (int index = 0; index < (unconnected.empty() ? 2 : 1); ++index) {
        check(cudaSetDevice(index), "cudaSetDevice");
        devices.push_back(std::make_unique<Device>(index));
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    if (!unconnected.empty()) {
        Line("skip").text("measure", "copies between two devices").text("reason", unconnected).print();
        const bool one = measure_grid(devices, {"loop back, one copy", true, false, 1});
        return measure_grid(devices, {"loop back, two copies", true, true, 1}) && one;
    }
    bool ok = true;
    for (const Pattern& pattern :
         {Pattern{"pull, one way", true, false, 1}, Pattern{"pull, both ways", true, false, 2},
          Pattern{"push, one way", false, true, 1}, Pattern{"push, both ways", false, true, 2},
          Pattern{"pull and push, both ways", true, true, 2}}) {
        ok = measure_grid(devices, pattern) && ok;
    }
    return ok;
}

}  // namespace mega_moe::bench
