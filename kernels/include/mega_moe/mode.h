#pragma once
#include <cstdint>

// Which kernel a call means, one enum per question. Python packs the answers, binding/ unpacks them,
// everything below asks the same names.
namespace mega_moe {

enum class Direction : std::int8_t { kForward, kBackward };

// dtype of the operands of a GEMM; kNone: there is no such GEMM.
enum class Precision : std::int8_t { kNone, kBf16, kFp8 };

// What the forward leaves in memory for the backward.
enum class Saved : std::int8_t { kNothing, kGateUp };

// Scale factors of fp8: amax / 448 as it is, or rounded up to a power of two.
enum class ScaleFormat : std::int8_t { kFp32, kPowerOfTwo };

// What the memory of a rank is laid out for. Equal on all ranks.
struct Mode {
    Precision forward = Precision::kNone;  // kNone: routing tables alone
    Precision backward =
        Precision::kNone;  // dgrad and the recomputation of gate and up; kNone: no backward kernel
    Precision wgrad = Precision::kNone;  // fp8 only where `backward` is
    ScaleFormat scale_format = ScaleFormat::kFp32;
};

}  // namespace mega_moe
