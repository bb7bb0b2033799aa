#include "emulate/fibers.h"

#include <ucontext.h>

#include <cstring>

namespace mega_moe::emulate {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024;

}  // namespace

struct Thread {
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    const Grid* grid = nullptr;
    Cta* cta = nullptr;
    unsigned index = 0;
    bool ended = false;
    const std::uint64_t* waits_for = nullptr;  // a generation that must change
    std::uint64_t generation = 0;
};

namespace {

ucontext_t scheduler;
Thread* running = nullptr;

void body_of_running() {
    Thread* self = running;
    self->grid->body(reinterpret_cast<std::byte*>(self->cta->shared.data()));
    self->ended = true;
    swapcontext(&self->context, &scheduler);
}

void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.members) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    running->waits_for = &meeting.generation;
    running->generation = meeting.generation;
    yield();
}

Warp& own_warp() {
    return running->cta->warps[running->index / 32];
}

}  // namespace

namespace {

std::unique_ptr<Cta> make_cta(const Grid& grid, unsigned index) {
    auto cta = std::make_unique<Cta>();
    cta->index = index;
    cta->meeting.members = static_cast<int>(grid.num_threads);
    cta->warps.resize(grid.num_threads / 32);
    for (Warp& warp : cta->warps)
        warp.meeting.members = 32;
    cta->shared.resize(grid.shared_bytes / sizeof(std::max_align_t) + 1);
    std::memset(cta->shared.data(), 0xA5, cta->shared.size() * sizeof(std::max_align_t));
    return cta;
}

std::unique_ptr<Thread> make_thread(const Grid& grid, Cta& cta, unsigned index) {
    auto thread = std::make_unique<Thread>();
    thread->grid = &grid;
    thread->cta = &cta;
    thread->index = index;
    thread->stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack.get();
    thread->context.uc_stack.ss_size = kStackBytes;
    makecontext(&thread->context, body_of_running, 0);
    return thread;
}

}  // namespace

void run(const std::vector<Grid>& grids) {
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Thread>> threads;
    for (const Grid& grid : grids)
        for (unsigned c = 0; c < grid.num_ctas; ++c) {
            ctas.push_back(make_cta(grid, c));
            for (unsigned t = 0; t < grid.num_threads; ++t)
                threads.push_back(make_thread(grid, *ctas.back(), t));
        }
    // Forth and back, so that a thread that does not wait for another is seen both before and after it.
    bool forth = true;
    for (bool alive = true; alive; forth = !forth) {
        alive = false;
        for (std::size_t i = 0; i < threads.size(); ++i) {
            Thread* thread = threads[forth ? i : threads.size() - 1 - i].get();
            if (thread->ended) continue;
            alive = true;
            if (thread->waits_for != nullptr && *thread->waits_for == thread->generation) continue;
            thread->waits_for = nullptr;
            running = thread;
            swapcontext(&scheduler, &thread->context);
        }
    }
}

Index thread_index() {
    return {running->index};
}
Index cta_index() {
    return {running->cta->index};
}
Index grid_size() {
    return {running->grid->num_ctas};
}

void meet_cta() {
    meet(running->cta->meeting);
}
void meet_warp() {
    meet(own_warp().meeting);
}

const std::uint32_t* exchange(std::uint32_t value) {
    meet_warp();  // the last exchange has been read
    own_warp().exchanged[running->index % 32] = value;
    meet_warp();
    return own_warp().exchanged;
}

void yield() {
    swapcontext(&running->context, &scheduler);
}

}  // namespace mega_moe::emulate
