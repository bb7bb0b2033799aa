#include <stdexcept>
#include <string>

#include "bench/common/launch.h"
#include "bench/gemm/product.h"
#include "bench/gemm/shapes.h"
#include "bench/groups.h"

namespace mega_moe::bench {
namespace {

constexpr char kVariant[] = "bf16_128x256_n256_multicast";

GemmVariant find_variant(const std::string& name) {
    for (const GemmVariant& variant : gemm_variants()) {
        if (name == variant.name) return variant;
    }
    throw std::invalid_argument(name + ": not in variants.toml");
}

}  // namespace

bool run_sms() {
    const GemmVariant variant = find_variant(kVariant);
    Operands operands = operands_for_shapes();
    DeviceArray<ClockSpan> clock(1);
    const int all = num_sms() / 2 * 2;
    if (!check_variant(variant, operands, clock.data(), all, nullptr)) return false;
    bool all_ok = true;
    // The power cap needs some tenths of a second to settle at another number of SMs.
    TimingPlan plan;
    plan.sustained_ms = 200;
    for (const Shape* shape : {&kShapes[0], &kShapes[2]}) {
        operands.fill(*shape, variant, 11, nullptr);
        for (const int blocks : {all, all - 2, all - 8, all - 16, all - 32, all / 4 * 2}) {
            operands.d.fill_bytes(0xFF);
            Product product(variant, operands, *shape, blocks, clock.data(), nullptr);
            const Timing timing = time_launches([&] { product.launch(); }, clock.data(), plan);
            if (check_output(variant, operands, *shape, blocks, nullptr)) {
                print_rate("sms", variant, *shape, blocks, timing);
            } else {
                all_ok = false;
            }
        }
    }
    return all_ok;
}

}  // namespace mega_moe::bench
