#pragma once

// Numeric helpers are also compiled by the host compiler, so that CPU tests can prove them over every input.
#if defined(__CUDACC__)
#define MEGA_MOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEGA_MOE_HOST_DEVICE inline
#endif
