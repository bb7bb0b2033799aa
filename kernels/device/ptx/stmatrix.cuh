#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// Four 8x8 matrices, transposed when stored: lane l holds elements l / 4 of rows 2 (l % 4) and + 1 of each.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t row, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

}  // namespace mega_moe::device::ptx
