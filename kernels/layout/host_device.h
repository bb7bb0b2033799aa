#pragma once

// Layout laws are evaluated on the host, at compile time and in kernels.
#if defined(__CUDACC__)
#define MEGA_MOE_LAW __host__ __device__ constexpr
#else
#define MEGA_MOE_LAW constexpr
#endif
