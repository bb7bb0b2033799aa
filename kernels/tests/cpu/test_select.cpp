#include <cstring>
#include <iterator>

#include "cpu/check.h"
#include "host/select.h"
#include "host/variants.h"
#include "mega_moe/layer.h"

namespace {

using mega_moe::Op;
using mega_moe::Precision;
using mega_moe::Saved;
using mega_moe::select_variant;
using mega_moe::Status;
using mega_moe::Variant;
using mega_moe::VariantKey;

mega_moe::layout::KernelFacts no_kernel() {
    return {nullptr, 0};
}

constexpr Variant variant(const char* name, Op op, Precision precision, const char* architecture,
                          int compute_capability) {
    Variant made{};
    made.name = name;
    made.key = {op, precision};
    made.architecture = architecture;
    made.compute_capability = compute_capability;
    made.facts = &no_kernel;
    return made;
}

constexpr Variant layer(const char* name, VariantKey key) {
    Variant made = variant(name, key.op, key.precision, "90a", 90);
    made.key = key;
    return made;
}

constexpr Precision kNone = Precision::kNone;
constexpr Precision kBf16 = Precision::kBf16;
constexpr Precision kFp8 = Precision::kFp8;
constexpr Saved kNothing = Saved::kNothing;
constexpr Saved kGateUp = Saved::kGateUp;

constexpr Variant kTable[] = {
    variant("a", Op::kRoute, Precision::kNone, "90a", 90),
    variant("b", Op::kQuantizeWeights, Precision::kFp8, "90a", 90),
    variant("c", Op::kQuantizeWeights, Precision::kFp8, "103a", 103),
    layer("d", {Op::kForward, kBf16, kNone, kNothing, false}),
    layer("e", {Op::kForward, kBf16, kNone, kGateUp, false}),
    layer("f", {Op::kForward, kBf16, kNone, kGateUp, true}),
    layer("g", {Op::kForward, kFp8, kNone, kNothing, true}),
    layer("h", {Op::kBackward, kFp8, kBf16, kNothing, false}),
    layer("i", {Op::kBackward, kFp8, kFp8, kNothing, false}),
};

const char* selected(const VariantKey& key, int compute_capability) {
    const Variant* found = nullptr;
    const Status status = select_variant(kTable, std::size(kTable), key, compute_capability, found);
    CHECK(status.ok == (found != nullptr), "status and result disagree");
    return found != nullptr ? found->name : "none";
}

void expect_refusal(const VariantKey& key, int compute_capability, const char* want) {
    const Variant* found = nullptr;
    const Status status = select_variant(kTable, std::size(kTable), key, compute_capability, found);
    CHECK(!status.ok && std::strcmp(status.message, want) == 0, "got '%s', want '%s'", status.message, want);
}

}  // namespace

void test_select() {
    CHECK(std::strcmp(selected({Op::kRoute}, 90), "a") == 0, "routing on 9.0");
    CHECK(std::strcmp(selected({Op::kQuantizeWeights, kFp8}, 90), "b") == 0, "fp8 on 9.0");
    CHECK(std::strcmp(selected({Op::kQuantizeWeights, kFp8}, 103), "c") == 0, "fp8 on 10.3");
    CHECK(std::strcmp(selected({Op::kForward, kBf16}, 90), "d") == 0, "forward");
    CHECK(std::strcmp(selected({Op::kForward, kBf16, kNone, kGateUp}, 90), "e") == 0, "forward that saves");
    // A kernel that traces does either.
    for (const Saved saved : {kNothing, kGateUp})
        CHECK(std::strcmp(selected({Op::kForward, kBf16, kNone, saved, true}, 90), "f") == 0,
              "traced forward");
    CHECK(std::strcmp(selected({Op::kForward, kFp8, kNone, kNothing, true}, 90), "g") == 0, "traced in fp8");
    CHECK(std::strcmp(selected({Op::kBackward, kFp8, kBf16}, 90), "h") == 0, "dW in bf16");
    CHECK(std::strcmp(selected({Op::kBackward, kFp8, kFp8}, 90), "i") == 0, "dW in fp8");
    // 10.0 and 10.3 share a major number, and a kernel of one does not run on the other.
    expect_refusal({Op::kQuantizeWeights, kFp8}, 100,
                   "quantize_weights (fp8): the device has compute capability 10.0, this build holds kernels "
                   "for: 90a, 103a");
    expect_refusal(
        {Op::kRoute}, 80,
        "route (any precision): the device has compute capability 8.0, this build holds kernels for: 90a");
    expect_refusal(
        {Op::kClockProbe}, 90,
        "clock_probe (any precision): the device has compute capability 9.0, this build holds kernels for: "
        "none");
    // One that saves is no stand-in where nothing is to be saved, nor the other way round.
    expect_refusal(
        {Op::kForward, kFp8, kNone, kGateUp, true}, 90,
        "forward (fp8, saved gate and up, trace): the device has compute capability 9.0, this build "
        "holds kernels for: none");
    expect_refusal(
        {Op::kBackward, kFp8, kFp8, kNothing, true}, 90,
        "backward (fp8, dW in fp8, trace): the device has compute capability 9.0, this build holds "
        "kernels for: none");
    for (const Variant& variant : mega_moe::kVariants) {
        const mega_moe::layout::KernelFacts facts = variant.facts();
        CHECK(facts.kernel != nullptr && facts.threads > 0, "%s has no kernel", variant.name);
        const bool layer = variant.key.op == Op::kForward || variant.key.op == Op::kBackward;
        CHECK(layer == (facts.shared_bytes > facts.route_bytes && facts.route_bytes > 0 && facts.block_n > 0),
              "%s: %d bytes, %d to route, block_n %d", variant.name, facts.shared_bytes, facts.route_bytes,
              facts.block_n);
        const Variant* found = nullptr;
        static_cast<void>(select_variant(mega_moe::kVariants, std::size(mega_moe::kVariants), variant.key,
                                         variant.compute_capability, found));
        CHECK(found == &variant, "%s is shadowed by another variant", variant.name);
    }
    const auto multiples = [](mega_moe::Mode mode, mega_moe::Direction direction) {
        return mega_moe::layer_multiples(mode, direction);
    };
    const mega_moe::Multiples bf16 = multiples({kBf16, kNone, kNone}, mega_moe::Direction::kForward);
    CHECK(bf16.hidden == 256 && bf16.intermediate == 128, "bf16: %lld", static_cast<long long>(bf16.hidden));
    const mega_moe::Multiples fp8 = multiples({kFp8, kFp8, kFp8}, mega_moe::Direction::kForward);
    CHECK(fp8.hidden == 512 && fp8.intermediate == 128, "fp8: %lld", static_cast<long long>(fp8.hidden));
    const mega_moe::Multiples none = multiples({kBf16, kNone, kNone}, mega_moe::Direction::kBackward);
    CHECK(none.hidden == 1 && none.intermediate == 1, "none: %lld", static_cast<long long>(none.hidden));
}
