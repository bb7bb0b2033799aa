#include <cstring>
#include <iterator>

#include "cpu/check.h"
#include "host/select.h"
#include "host/variants.h"

namespace {

using mega_moe::Op;
using mega_moe::Precision;
using mega_moe::select_variant;
using mega_moe::Status;
using mega_moe::Variant;

const void* no_kernel() {
    return nullptr;
}

constexpr Variant variant(const char* name, Op op, Precision precision, const char* architecture,
                          int compute_capability) {
    Variant made{};
    made.name = name;
    made.op = op;
    made.precision = precision;
    made.architecture = architecture;
    made.compute_capability = compute_capability;
    made.kernel = &no_kernel;
    return made;
}

constexpr Variant kTable[] = {
    variant("a", Op::kStage, Precision::kBf16, "90a", 90),
    variant("b", Op::kStage, Precision::kFp8, "90a", 90),
    variant("c", Op::kStage, Precision::kFp8, "103a", 103),
};

const char* selected(Op op, Precision precision, int compute_capability) {
    const Variant* found = nullptr;
    const Status status = select_variant(kTable, std::size(kTable), op, precision, compute_capability, found);
    CHECK(status.ok == (found != nullptr), "status and result disagree");
    return found != nullptr ? found->name : "none";
}

void expect_refusal(Op op, Precision precision, int compute_capability, const char* want) {
    const Variant* found = nullptr;
    const Status status = select_variant(kTable, std::size(kTable), op, precision, compute_capability, found);
    CHECK(!status.ok && std::strcmp(status.message, want) == 0, "got '%s', want '%s'", status.message, want);
}

}  // namespace

void test_select() {
    CHECK(std::strcmp(selected(Op::kStage, Precision::kBf16, 90), "a") == 0, "bf16 on 9.0");
    CHECK(std::strcmp(selected(Op::kStage, Precision::kFp8, 90), "b") == 0, "fp8 on 9.0");
    CHECK(std::strcmp(selected(Op::kStage, Precision::kFp8, 103), "c") == 0, "fp8 on 10.3");
    // 10.0 and 10.3 share a major number, and a kernel of one does not run on the other.
    expect_refusal(
        Op::kStage, Precision::kFp8, 100,
        "stage (fp8): the device has compute capability 10.0, this build holds kernels for: 90a, 103a");
    expect_refusal(Op::kStage, Precision::kBf16, 80,
                   "stage (bf16): the device has compute capability 8.0, this build holds kernels for: 90a");
    expect_refusal(
        Op::kClockProbe, Precision::kNone, 90,
        "clock_probe (any precision): the device has compute capability 9.0, this build holds kernels for: "
        "none");
    for (const Variant& variant : mega_moe::kVariants) {
        CHECK(variant.kernel() != nullptr, "%s has no kernel", variant.name);
        const Variant* found = nullptr;
        static_cast<void>(select_variant(mega_moe::kVariants, std::size(mega_moe::kVariants), variant.op,
                                         variant.precision, variant.compute_capability, found));
        CHECK(found == &variant, "%s is shadowed by another variant", variant.name);
    }
}
