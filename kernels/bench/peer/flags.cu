// The round trip of a flag: a store with release into the other's memory, a load with acquire on one's own.
// Between two SMs of one device, at both scopes, and between two devices.
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/check.h"
#include "bench/common/clock_span.cuh"
#include "bench/common/device_array.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/common/timing.h"
#include "bench/groups.h"
#include "bench/peer/devices.h"
#include "device/ptx/ordered_memory.cuh"
#include "device/ptx/special_registers.cuh"

namespace mega_moe::bench {
namespace {

namespace ptx = device::ptx;

constexpr int kWordsPerSide = 32;  // the flag, and the payload in another cache line
constexpr int kPayload = 16;
constexpr int64_t kLimitNs = 5000000000;

struct Answer {
    uint32_t trips;  // that were completed
    uint32_t stale;  // payloads that were not there when their flag was
    uint32_t sm;
};

struct Side {
    uint64_t* own;
    uint64_t* other;
    Answer* answer;
    ClockSpan* clock;
    uint32_t first;  // 1: sends the first flag
};

struct TripParams {
    Side sides[2];  // of block 0 and block 1
    uint32_t trips;
    bool checked;
    bool system_scope;
};

__device__ uint32_t payload_of(uint32_t trip) {
    return trip * 2654435761u;
}

__device__ void send(const TripParams& p, const Side& side, uint32_t trip) {
    if (p.checked) side.other[kPayload] = payload_of(trip);
    if (p.system_scope) {
        ptx::store_release_sys(side.other, trip);
    } else {
        ptx::add_release_gpu(side.other, 1);
    }
}

// False when the flag did not come in time.
__device__ bool receive(const TripParams& p, const Side& side, uint32_t trip, int64_t deadline) {
    for (uint32_t polls = 1;; ++polls) {
        const uint64_t seen =
            p.system_scope ? ptx::load_acquire_sys(side.own) : ptx::load_acquire_gpu(side.own);
        if (seen >= trip) break;
        if (polls % 1024 == 0 && ptx::global_timer() > deadline) return false;
    }
    if (p.checked && side.own[kPayload] != payload_of(trip)) ++side.answer->stale;
    return true;
}

__global__ void __launch_bounds__(32, 1) bounce(const __grid_constant__ TripParams p) {
    if (threadIdx.x != 0) return;
    const Side& side = p.sides[blockIdx.x];
    const int64_t deadline = ptx::global_timer() + kLimitNs;
    side.answer->sm = ptx::sm_id();
    start_clock(side.clock);
    uint32_t trip = 1;
    for (; trip <= p.trips; ++trip) {
        if (side.first) send(p, side, trip);
        if (!receive(p, side, trip, deadline)) break;
        if (!side.first) send(p, side, trip);
    }
    stop_clock(side.clock);
    side.answer->trips = trip - 1;
}

// The words, answer and clock of one side, in the memory of one device.
struct SideMemory {
    SideMemory() : words(kWordsPerSide), answer(1), clock(1) {}
    void clear() {
        words.fill_bytes(0);
        answer.fill_bytes(0);
        clock.fill_bytes(0);
    }
    DeviceArray<uint64_t> words;
    DeviceArray<Answer> answer;
    DeviceArray<ClockSpan> clock;
};

struct Route {
    const char* name;
    std::array<int, 2> devices;
    bool system_scope;
};

struct Trip {
    double us;
    double mhz;
    bool ok;
    Answer answers[2];
};

class Pair {
  public:
    explicit Pair(const Route& route) : route_(route), memory_(2) {
        for (std::size_t i = 0; i < 2; ++i) {
            select(i);
            memory_[i] = std::make_unique<SideMemory>();
            check(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags");
        }
    }
    ~Pair() {
        for (cudaStream_t stream : streams_)
            static_cast<void>(cudaStreamDestroy(stream));
    }
    Pair(const Pair&) = delete;
    Pair& operator=(const Pair&) = delete;

    Trip run(uint32_t trips, bool checked) {
        TripParams p = {};
        for (std::size_t i = 0; i < 2; ++i) {
            select(i);
            memory_[i]->clear();
            p.sides[i] = {memory_[i]->words.data(), memory_[1 - i]->words.data(), memory_[i]->answer.data(),
                          memory_[i]->clock.data(), i == 0};
        }
        p.trips = trips;
        p.checked = checked;
        p.system_scope = route_.system_scope;
        launch_both(p);
        Trip trip = {};
        trip.ok = true;
        for (std::size_t i = 0; i < 2; ++i) {
            select(i);
            check(cudaStreamSynchronize(streams_[i]), route_.name);
            trip.answers[i] = memory_[i]->answer.to_host()[0];
            trip.ok = trip.ok && trip.answers[i].trips == trips && trip.answers[i].stale == 0;
        }
        select(0);
        const ClockSpan span = memory_[0]->clock.to_host()[0];
        trip.us = 1e-3 * static_cast<double>(span.ns) / trips;
        trip.mhz = megahertz(span);
        return trip;
    }

  private:
    void select(std::size_t side) { check(cudaSetDevice(route_.devices[side]), "cudaSetDevice"); }

    // On one device a single cooperative launch of two blocks, which share no SM as each takes all shared
    // memory; on two devices a launch on each.
    void launch_both(TripParams& p) {
        const void* kernel = reinterpret_cast<const void*>(&bounce);
        if (route_.devices[0] == route_.devices[1]) {
            select(0);
            check(launch(kernel, {2, 32, max_shared_bytes(), 1, true}, &p, streams_[0]), route_.name);
            return;
        }
        for (std::size_t i = 0; i < 2; ++i) {
            TripParams own = p;
            own.sides[0] = p.sides[i];
            select(i);
            check(launch(kernel, {1, 32, 0, 1, false}, &own, streams_[i]), route_.name);
        }
    }

    Route route_;
    std::vector<std::unique_ptr<SideMemory>> memory_;
    std::array<cudaStream_t, 2> streams_ = {};
};

bool measure(const Route& route) {
    constexpr uint32_t kBurstTrips = 2000;
    constexpr uint32_t kSustainedTrips = 40000;
    Pair pair(route);
    const Trip first = pair.run(kBurstTrips, true);
    const bool apart = route.devices[0] != route.devices[1] || first.answers[0].sm != first.answers[1].sm;
    const bool ok = first.ok && apart;
    Line("check")
        .text("variant", route.name)
        .integer("trips", first.answers[0].trips)
        .integer("stale_payloads", first.answers[0].stale + first.answers[1].stale)
        .integer("sm", first.answers[0].sm)
        .integer("other_sm", first.answers[1].sm)
        .flag("ok", ok)
        .print();
    if (!ok) return false;

    std::array<Trip, 3> bursts = {};
    std::array<Trip, 3> sustained = {};
    for (Trip& trip : bursts) {
        std::this_thread::sleep_for(std::chrono::milliseconds(250));
        trip = pair.run(kBurstTrips, false);
    }
    for (Trip& trip : sustained)
        trip = pair.run(kSustainedTrips, false);
    const auto middle = [](std::array<Trip, 3>& trips) {
        std::sort(trips.begin(), trips.end(), [](const Trip& a, const Trip& b) { return a.us < b.us; });
        return trips[1];
    };
    const Timing timing = {middle(bursts).us, middle(bursts).mhz, middle(sustained).us,
                           middle(sustained).mhz};
    Line line("row");
    line.text("measure", "flag round trip").text("variant", route.name);
    timing.add_to(line);
    line.print();
    return true;
}

}  // namespace

bool run_flags() {
    bool ok = measure({"two SMs, counter at gpu scope", {0, 0}, false});
    ok = measure({"two SMs, store at system scope", {0, 0}, true}) && ok;
    const std::string unconnected = connect_two_devices();
    if (!unconnected.empty()) {
        Line("skip")
            .text("measure", "flag round trip between two devices")
            .text("reason", unconnected)
            .print();
        return ok;
    }
    return measure({"two devices, store at system scope", {0, 1}, true}) && ok;
}

}  // namespace mega_moe::bench
