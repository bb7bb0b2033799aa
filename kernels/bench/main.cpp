// mega_moe_microbench GROUP: measures one group on the current devices and prints a JSON object a line
// (common/report.h). Status 0 when all checks passed, 1 when one did not or something failed, 2 for a wrong
// command line.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "bench/common/check.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/groups.h"

namespace mega_moe::bench {
namespace {

struct Group {
    const char* name;
    bool (*run)();
};

constexpr Group kGroups[] = {{"peer", run_peer}, {"l2", run_l2},         {"tiles", run_tiles},
                             {"sms", run_sms},   {"launch", run_launch}, {"flags", run_flags}};

void print_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int device = 0; device < count; ++device) {
        cudaDeviceProp properties = {};
        check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
        Line("device")
            .integer("index", device)
            .text("name", properties.name)
            .integer("compute_capability", 10 * properties.major + properties.minor)
            .integer("sms", properties.multiProcessorCount)
            .integer("l2_bytes", properties.l2CacheSize)
            .integer("memory_bytes", static_cast<std::int64_t>(properties.totalGlobalMem))
            .print();
        if (properties.major != 9 || properties.minor != 0) {
            throw std::runtime_error(
                std::string(properties.name) +
                ": got a compute capability other than 9.0, which the kernels are compiled for");
        }
    }
}

int run(const char* name) {
    for (const Group& group : kGroups) {
        if (std::strcmp(group.name, name) != 0) continue;
        try {
            print_devices();
            return group.run() ? 0 : 1;
        } catch (const std::exception& error) {
            Line("error").text("message", error.what()).print();
            return 1;
        }
    }
    std::fprintf(stderr, "GROUP: got %s, want one of", name);
    for (const Group& group : kGroups)
        std::fprintf(stderr, " %s", group.name);
    std::fprintf(stderr, "\n");
    return 2;
}

}  // namespace
}  // namespace mega_moe::bench

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s GROUP\n", argv[0]);
        return 2;
    }
    return mega_moe::bench::run(argv[1]);
}
