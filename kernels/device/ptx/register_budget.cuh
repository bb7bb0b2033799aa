#pragma once

// Moves registers between the warpgroups of a block; every warp of a warpgroup executes it. ptxas ignores it
// in relocatable code and without a bound on the threads of a block.
namespace mega_moe::device::ptx {

template <int Registers>
__device__ __forceinline__ void shrink_registers() {
    static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "registers per thread");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void grow_registers() {
    static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "registers per thread");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace mega_moe::device::ptx
