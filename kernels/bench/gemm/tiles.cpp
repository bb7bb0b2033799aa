#include "bench/common/launch.h"
#include "bench/gemm/product.h"
#include "bench/gemm/shapes.h"
#include "bench/groups.h"

namespace mega_moe::bench {

bool run_tiles() {
    const auto variants = gemm_variants();
    Operands operands = operands_for_shapes();
    DeviceArray<ClockSpan> clock(1);
    const int blocks = num_sms() / 2 * 2;
    bool all_ok = true;
    std::vector<GemmVariant> right;
    for (const GemmVariant& variant : variants) {
        if (check_variant(variant, operands, clock.data(), blocks, nullptr)) right.push_back(variant);
    }
    all_ok = right.size() == variants.size();
    for (const Shape& shape : kShapes) {
        for (const GemmVariant& variant : right) {
            operands.fill(shape, variant, 11, nullptr);
            operands.d.fill_bytes(0xFF);
            Product product(variant, operands, shape, blocks, clock.data(), nullptr);
            const Timing timing = time_launches([&] { product.launch(); }, clock.data());
            if (check_output(variant, operands, shape, blocks, nullptr)) {
                print_rate("tiles", variant, shape, blocks, timing);
            } else {
                all_ok = false;
            }
        }
    }
    return all_ok;
}

}  // namespace mega_moe::bench
