#pragma once
#include <vector>

namespace mega_moe::bench {

// What the host has to know of a compiled GEMM; the fields are those of GemmConfig.
struct GemmVariant {
    const char* name;
    const void* kernel;
    bool e4m3;
    bool promoted;
    bool a_mn_major;
    bool b_mn_major;
    int block_m;
    int block_n;
    int cluster;
    int threads;
    int shared_bytes;
};

// All of variants.toml, in its order.
std::vector<GemmVariant> gemm_variants();

}  // namespace mega_moe::bench
