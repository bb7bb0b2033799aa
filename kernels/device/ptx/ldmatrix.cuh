#pragma once
#include <cstdint>

namespace mega_moe::device::ptx {

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and gets
// elements 2 (l % 4) and + 1 of row l / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t row, uint32_t (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace mega_moe::device::ptx
