#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// Runs device code on the CPU: every CUDA thread is a fiber of one OS thread, so a run is the same each time.
// Fibers change only where threads of a GPU would wait: barriers, exchanges between lanes, polls of a flag.
namespace mega_moe::emulate {

struct Thread;

// Threads that meet: a CTA or a warp.
struct Meeting {
    int members = 0;
    int arrived = 0;
    std::uint64_t generation = 0;
};

struct Warp {
    Meeting meeting;
    std::uint32_t exchanged[32] = {};
};

struct Cta {
    unsigned index = 0;
    Meeting meeting;
    std::vector<Warp> warps;
    std::vector<std::max_align_t> shared;
};

struct Grid {
    unsigned num_ctas;
    unsigned num_threads;
    std::size_t shared_bytes;
    std::function<void(std::byte*)> body;  // of each thread; gets the CTA's shared memory
};

// Runs the grids at once until all have ended. Each starts in shared memory full of garbage.
void run(const std::vector<Grid>& grids);

struct Index {
    unsigned x;
};

// Where the running thread is.
Index thread_index();
Index cta_index();
Index grid_size();
void meet_cta();
void meet_warp();
// Every lane gives a value and gets those of all.
const std::uint32_t* exchange(std::uint32_t value);
// Lets the others run.
void yield();

}  // namespace mega_moe::emulate
