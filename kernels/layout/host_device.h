#pragma once

// Functions of the layouts are evaluated on the host, at compile time and in kernels.
#if defined(__CUDACC__)
#define MEGA_MOE_HD_CONSTEXPR __host__ __device__ constexpr
#else
#define MEGA_MOE_HD_CONSTEXPR constexpr
#endif
