#pragma once
#include "bench/gemm/config.cuh"
#include "bench/gemm/kernel.cuh"
#include "bench/gemm/variant.h"

namespace mega_moe::bench {

template <class C>
GemmVariant describe(const char* name) {
    GemmVariant v = {};
    v.name = name;
    v.kernel = reinterpret_cast<const void*>(&gemm<C>);
    v.e4m3 = C::kElement == Element::kE4m3;
    v.promoted = C::kPromoted;
    v.a_mn_major = C::kMajorA == device::sm90::Major::kMn;
    v.b_mn_major = C::kMajorB == device::sm90::Major::kMn;
    v.block_m = C::kBlockM;
    v.block_n = C::kBlockN;
    v.cluster = C::kClusterSize;
    v.threads = C::kThreads;
    v.shared_bytes = C::kSharedBytes;
    return v;
}

}  // namespace mega_moe::bench
