#include "bench/common/timing.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include "bench/common/check.h"

namespace mega_moe::bench {
namespace {

// One of the launches with the events around a series of them.
class Lane {
  public:
    explicit Lane(const TimedLaunch& timed) : timed_(timed) {
        select();
        check(cudaEventCreate(&start_), "cudaEventCreate");
        check(cudaEventCreate(&stop_), "cudaEventCreate");
    }
    ~Lane() {
        static_cast<void>(cudaEventDestroy(start_));
        static_cast<void>(cudaEventDestroy(stop_));
    }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    void start() {
        select();
        check(cudaEventRecord(start_, timed_.stream), "cudaEventRecord");
    }
    void launch() {
        select();
        timed_.launch();
    }
    void stop() {
        select();
        check(cudaEventRecord(stop_, timed_.stream), "cudaEventRecord");
    }
    double elapsed_us() {
        check(cudaEventSynchronize(stop_), "cudaEventSynchronize");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, start_, stop_), "cudaEventElapsedTime");
        return 1e3 * static_cast<double>(ms);
    }
    void wait() {
        select();
        check(cudaStreamSynchronize(timed_.stream), "cudaStreamSynchronize");
    }
    void clear_clock() {
        select();
        check(cudaMemsetAsync(timed_.clock, 0, sizeof(ClockSpan), timed_.stream), "cudaMemsetAsync");
    }
    double read_megahertz() {
        wait();
        ClockSpan span = {};
        check(cudaMemcpy(&span, timed_.clock, sizeof(span), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return megahertz(span);
    }

  private:
    void select() { check(cudaSetDevice(timed_.device), "cudaSetDevice"); }

    TimedLaunch timed_;
    cudaEvent_t start_ = nullptr;
    cudaEvent_t stop_ = nullptr;
};

using Lanes = std::vector<std::unique_ptr<Lane>>;

// Microseconds per launch of each lane, when each enqueues `count`.
std::vector<double> run(Lanes& lanes, int count) {
    for (auto& lane : lanes)
        lane->start();
    for (int i = 0; i < count; ++i) {
        for (auto& lane : lanes)
            lane->launch();
    }
    for (auto& lane : lanes)
        lane->stop();
    std::vector<double> us;
    for (auto& lane : lanes)
        us.push_back(lane->elapsed_us() / count);
    return us;
}

std::vector<double> medians(std::array<std::vector<double>, 3> runs) {
    std::vector<double> middle;
    for (std::size_t lane = 0; lane < runs[0].size(); ++lane) {
        std::array<double, 3> one = {runs[0][lane], runs[1][lane], runs[2][lane]};
        std::sort(one.begin(), one.end());
        middle.push_back(one[1]);
    }
    return middle;
}

int launches_for(double ms, double launch_us) {
    return static_cast<int>(std::clamp(1e3 * ms / launch_us, 2.0, 2000.0));
}

}  // namespace

void Timing::add_to(Line& line) const {
    line.number("burst_us", burst_us)
        .number("burst_mhz", burst_mhz)
        .number("sustained_us", sustained_us)
        .number("sustained_mhz", sustained_mhz);
}

std::vector<Timing> time_together(const std::vector<TimedLaunch>& launches, const TimingPlan& plan) {
    Lanes lanes;
    for (const TimedLaunch& timed : launches)
        lanes.push_back(std::make_unique<Lane>(timed));
    run(lanes, 1);
    const std::vector<double> estimates = run(lanes, 2);
    const double estimate_us = *std::max_element(estimates.begin(), estimates.end());
    std::array<std::vector<double>, 3> us;

    const int burst = launches_for(plan.burst_ms, estimate_us);
    for (auto& lane : lanes)
        lane->clear_clock();
    for (auto& one : us) {
        for (auto& lane : lanes)
            lane->wait();
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(plan.idle_ms));
        for (auto& lane : lanes)
            lane->launch();  // the first after a pause also pays for waking up
        one = run(lanes, burst);
    }
    const std::vector<double> burst_us = medians(us);
    std::vector<Timing> timings(lanes.size());
    for (std::size_t i = 0; i < lanes.size(); ++i) {
        timings[i].burst_us = burst_us[i];
        timings[i].burst_mhz = lanes[i]->read_megahertz();
    }

    const int sustained = launches_for(plan.sustained_ms, estimate_us);
    run(lanes, sustained);
    for (auto& lane : lanes)
        lane->clear_clock();
    for (auto& one : us)
        one = run(lanes, sustained);
    const std::vector<double> sustained_us = medians(us);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
        timings[i].sustained_us = sustained_us[i];
        timings[i].sustained_mhz = lanes[i]->read_megahertz();
    }
    return timings;
}

}  // namespace mega_moe::bench
