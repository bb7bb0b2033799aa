#pragma once
#include "device/sm90/facts.cuh"
#include "device/sm90/smem.cuh"

// What one CTA takes of its SM, which it has alone.
namespace mega_moe::device::sm90 {

template <class C>
struct KernelBudget {
    static constexpr int kScaleBytes = C::kFp8 ? C::kAt.ring - C::kAt.x_scales : 0;
    static constexpr bool kFits = true;  // read by the kernel, so that the sums below are made
    static_assert(
        kWarpgroupThreads * C::kCommRegisters + C::kMathThreads * C::kMathRegisters <=
            C::kThreads * C::kLaunchRegisters,
        "registers: 128 * kCommRegisters + (threads - 128) * kMathRegisters <= threads * kLaunchRegisters");
    static_assert(C::kStages * C::kStageBytes + C::kMathWarps * kStoreBytes +
                          C::kPullBuffers * C::kPullBytes + kScaleBytes + (C::kAt.total - C::kAt.ring) <=
                      kSharedBytesOfBlock,
                  "shared memory: stages * 128 * (block_m + block_n) + math warps * 2048 + kPullBuffers * "
                  "kPullBytes + scale factors in fp8 + records and barriers <= 232448");
    static_assert(is_aligned(C::kAt),
                  "stages, pull buffers: what follows them in shared memory is not aligned");
    static_assert(!C::kFp8 || is_power_of_two(C::kStages),
                  "stages: the ring of a GEMM of e4m3 counts modulo a power of two");
};

}  // namespace mega_moe::device::sm90
