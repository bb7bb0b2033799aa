#include "bench/gemm/product.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/common/check.h"
#include "bench/common/launch.h"
#include "bench/common/report.h"
#include "bench/common/tensor_map.h"

namespace mega_moe::bench {
namespace {

// Rounding to bf16 alone gives 1.65e-3 to 1.75e-3; one wrong element in a hundred thousand gives as much
// again.
constexpr double kMaxError = 2.5e-3;
// The tensor core adds e4m3 products with about 14 bits, which a contraction of thousands shows when sums
// stay in it.
constexpr double kMaxErrorUnpromoted = 1e-2;

// FLOP per clock of one SM of compute capability 9.0.
constexpr double kBf16FlopsPerClock = 4096;
constexpr double kE4m3FlopsPerClock = 8192;

layout::TensorMap operand_map(const void* data, bool e4m3, bool mn_major, int rows, int k, int box_rows) {
    const auto extent = static_cast<std::uint64_t>(rows);
    const auto depth = static_cast<std::uint64_t>(k);
    const auto box = static_cast<std::uint32_t>(box_rows);
    if (mn_major) return map_columns(data, depth, extent, box);
    return map_rows(data, e4m3 ? MapElement::kByte : MapElement::kBf16, extent, depth, box);
}

double max_error(const GemmVariant& variant) {
    return variant.e4m3 && !variant.promoted ? kMaxErrorUnpromoted : kMaxError;
}

bool is_right(const GemmVariant& variant, const Comparison& result) {
    return result.relative_error <= max_error(variant) && result.not_finite == 0;
}

Line check_line(const GemmVariant& variant, const Shape& shape, int blocks, const Comparison& result) {
    Line line("check");
    line.text("variant", variant.name)
        .integer("m", shape.m)
        .integer("n", shape.n)
        .integer("k", shape.k)
        .integer("blocks", blocks)
        .number("relative_error", result.relative_error)
        .number("max_error", max_error(variant))
        .integer("not_finite", result.not_finite);
    return line;
}

}  // namespace

Product::Product(const GemmVariant& variant, const Operands& operands, const Shape& shape, int blocks,
                 ClockSpan* clock, cudaStream_t stream)
    : variant_(variant), params_(), blocks_(blocks), stream_(stream) {
    const int tile_m = variant.block_m * variant.cluster;
    if (shape.m % tile_m != 0 || shape.n % variant.block_n != 0 || shape.k % 128 != 0 ||
        blocks % variant.cluster != 0) {
        throw std::invalid_argument(std::string(variant.name) + ": shape " + shape.name +
                                    " is no multiple of its tiles");
    }
    params_.a =
        operand_map(operands.a.data(), variant.e4m3, variant.a_mn_major, shape.m, shape.k, variant.block_m);
    params_.b = operand_map(operands.b.data(), variant.e4m3, variant.b_mn_major, shape.n, shape.k,
                            variant.block_n / variant.cluster);
    params_.d = map_rows(operands.d.data(), MapElement::kBf16, static_cast<std::uint64_t>(shape.m),
                         static_cast<std::uint64_t>(shape.n), 16);
    params_.num_n_tiles = shape.n / variant.block_n;
    params_.num_tiles = shape.m / tile_m * params_.num_n_tiles;
    params_.num_k_blocks = shape.k / (variant.e4m3 ? 128 : 64);
    params_.rows = shape.m;
    params_.a_scale = operands.a_scale.data();
    params_.b_scale = operands.b_scale.data();
    params_.clock = clock;
}

void Product::launch() {
    const LaunchShape shape = {blocks_, variant_.threads, variant_.shared_bytes, variant_.cluster, false};
    check(bench::launch(variant_.kernel, shape, &params_, stream_), variant_.name);
}

bool check_variant(const GemmVariant& variant, Operands& operands, ClockSpan* clock, int blocks,
                   cudaStream_t stream) {
    struct Case {
        Shape shape;
        int blocks;
    };
    // Numbers of k-blocks that are no multiple of the stages move the ring against the tiles. Few blocks take
    // six or seven tiles each, so the warpgroups of ping-pong end on either side.
    const Case cases[] = {{{"one tile each", 2048, 1024, 640}, blocks},
                          {{"many tiles each", 4096, 1024, 896}, 20}};
    bool all_ok = true;
    for (const Case& one : cases) {
        operands.fill(one.shape, variant, 7, stream);
        Product product(variant, operands, one.shape, one.blocks, clock, stream);
        std::vector<std::uint16_t> outputs[2];
        for (auto& output : outputs) {
            check(cudaMemsetAsync(operands.d.data(), 0xFF, static_cast<std::size_t>(one.shape.outputs()) * 2,
                                  stream),
                  "cudaMemsetAsync");
            product.launch();
            output.resize(static_cast<std::size_t>(one.shape.outputs()));
            check(cudaMemcpyAsync(output.data(), operands.d.data(), output.size() * 2, cudaMemcpyDeviceToHost,
                                  stream),
                  variant.name);
            check(cudaStreamSynchronize(stream), variant.name);
        }
        const Comparison result = compare(operands, one.shape, variant, one.shape.outputs(), stream);
        const bool repeats = outputs[0] == outputs[1];
        const bool ok = is_right(variant, result) && repeats;
        check_line(variant, one.shape, one.blocks, result)
            .flag("repeats_bitwise", repeats)
            .flag("ok", ok)
            .print();
        all_ok = ok && all_ok;
    }
    return all_ok;
}

bool check_output(const GemmVariant& variant, const Operands& operands, const Shape& shape, int blocks,
                  cudaStream_t stream) {
    const std::int64_t samples = std::min<std::int64_t>(shape.outputs(), 1 << 16);
    const Comparison result = compare(operands, shape, variant, samples, stream);
    const bool ok = is_right(variant, result);
    check_line(variant, shape, blocks, result).integer("samples", samples).flag("ok", ok).print();
    return ok;
}

void print_rate(const char* group, const GemmVariant& variant, const Shape& shape, int blocks,
                const Timing& timing) {
    const double per_clock = blocks * (variant.e4m3 ? kE4m3FlopsPerClock : kBf16FlopsPerClock);
    const auto share = [&](double us, double mhz) { return shape.flops() / us / (per_clock * mhz); };
    Line line("row");
    line.text("measure", group)
        .text("variant", variant.name)
        .text("shape", shape.name)
        .integer("m", shape.m)
        .integer("n", shape.n)
        .integer("k", shape.k)
        .integer("blocks", blocks)
        .number("burst_tflops", shape.flops() / timing.burst_us * 1e-6)
        .number("sustained_tflops", shape.flops() / timing.sustained_us * 1e-6)
        .number("burst_share", share(timing.burst_us, timing.burst_mhz))
        .number("sustained_share", share(timing.sustained_us, timing.sustained_mhz));
    timing.add_to(line);
    line.print();
}

}  // namespace mega_moe::bench
