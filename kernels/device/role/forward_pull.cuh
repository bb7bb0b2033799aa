#pragma once
#include <cstdint>

#include "device/comm/wait.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/role/forward_schedule.cuh"

// Dispatch: rows of x from their ranks into the pool, each token once, whatever number of experts it has here.
namespace mega_moe::device {

// Pauses at random places, so that tests meet orders that a quiet machine never shows.
__device__ __forceinline__ void maybe_delay(std::uint32_t seed, std::uint32_t index) {
    if (seed == 0) return;
    std::uint32_t h = (index + blockIdx.x * 7919u) * 2654435761u ^ seed;
    h ^= h >> 15;
    h *= 2246822519u;
    if (h >> 28 == 0) ptx::sleep_ns(h >> 12 & 0x7FFF);
}

// One chunk as the communication warps see it.
struct ChunkView {
    int first_resident;
    int residents;
    int row_of_slot;  // row in the pools minus slot
};

__device__ __forceinline__ ChunkView view_chunk(const ForwardParams& p, int chunk) {
    const std::int32_t* row = p.route.chunk_table + std::int64_t{chunk} * layout::kChunkWords;
    return {table_word(row, layout::kChunkFirstResident), table_word(row, layout::kChunkResidents),
            static_cast<int>(layout::chunk_first_row(chunk, p.pool_rows)) -
                table_word(row, layout::kChunkFirstSlot)};
}

// A resident token and, in lane i, its i-th slot here.
struct ResidentToken {
    int token;
    int rank;
    int rows;
    int slot;
};

__device__ __forceinline__ ResidentToken load_resident(const RouteParams& r, const std::uint64_t* list, int at) {
    const std::uint64_t entry = ptx::load_relaxed_gpu(list + at);
    const auto low = static_cast<std::uint32_t>(entry);
    ResidentToken t{};
    t.token = static_cast<int>(low & 0xFFFFF);
    t.rank = static_cast<int>(low >> 20 & 31);
    t.rows = static_cast<int>(low >> 25 & 15) + 1;
    const auto lane = static_cast<int>(ptx::lane_id());
    if (lane < t.rows)
        t.slot = static_cast<int>(ptx::load_relaxed_gpu(r.slot_list + (entry >> 32) + lane));
    return t;
}

// A piece of a token's row on its way through one of the buffers.
struct PullPiece {
    ResidentToken from;
    int offset;  // bytes into the row
    int bytes;
    bool last;  // of the row
};

// One warp: waits, in lane 0, for one word. After a fault it waits no more.
template <class Load>
__device__ __forceinline__ void await_word(const Endpoint& e, std::uint64_t epoch, const Load& load,
                                           std::uint64_t wanted, Role role, std::uint64_t index, bool& lost) {
    if (ptx::lane_id() == 0 && !lost) {
        std::uint64_t seen;
        if (!wait_for(e, load, wanted, e.progress_ns, seen)) {
            give_up(e, epoch, {role, Kind::kProgress, index, seen, wanted});
            lost = true;
        }
    }
    lost = ptx::any(lost);
}

// One warp: this CTA's share of all chunks.
template <class C>
__device__ __forceinline__ void pull_rows(const ForwardParams& p, const ForwardShared<C>& shared,
                                          std::uint64_t epoch, Tracer<C::kTrace>& tracer) {
    const RouteParams& r = p.route;
    const Endpoint& e = r.endpoint;
    const auto lane = static_cast<int>(ptx::lane_id());
    const int row_bytes = p.hidden * 2;
    const int num_chunks = table_word(r.summary, layout::kSummaryChunks);
    RingCursor<C::kPullBuffers> loading;
    RingCursor<C::kPullBuffers> landing;
    bool lost = false;
    tracer.start();

    const auto begin = [&](const PullPiece& piece) {
        const ResidentToken& t = piece.from;
        if (e.num_ranks > 1 && piece.offset == 0) {
            const std::int64_t index = std::int64_t{t.rank} * r.max_blocks + t.token / layout::kBlockTokens;
            const std::uint64_t* flag = e.at<std::uint64_t>(e.rank, p.x_flags) + index;
            await_word(e, epoch, [&] { return ptx::load_acquire_sys(flag); }, epoch, Role::kPullSource,
                       static_cast<std::uint64_t>(index), lost);
            ptx::fence_proxy_async_global();
        }
        if (lane == 0) {
            const std::byte* x = e.num_ranks > 1 ? e.at<const std::byte>(t.rank, p.x_staged) : p.x;
            ptx::mbarrier_arrive_expect(shared.pulled(loading.at), static_cast<std::uint32_t>(piece.bytes));
            ptx::bulk_load(shared.pull_buffer(loading.at), x + std::int64_t{t.token} * row_bytes + piece.offset,
                           static_cast<std::uint32_t>(piece.bytes), shared.pulled(loading.at));
        }
        __syncwarp();
        loading.next();
    };
    const auto arrive = [&](const PullPiece& piece) {
        if (piece.last && lane < piece.from.rows)
            ptx::add_release_gpu(p.counters + p.arrived + piece.from.slot / layout::kRowBlock, 1);
    };

    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        const ChunkView view = view_chunk(p, chunk);
        if (chunk >= 2) {
            // The rows of the chunk before the last one lie where this one's go.
            const std::uint32_t* sent = p.counters + p.sent + chunk - 2;
            const auto wanted = static_cast<std::uint64_t>(view_chunk(p, chunk - 2).residents);
            await_word(e, epoch, [&] { return std::uint64_t{ptx::load_acquire_gpu(sent)}; }, wanted,
                       Role::kChunkFree, static_cast<std::uint64_t>(chunk), lost);
            tracer.end(TraceKind::kWaitPull, chunk, 0, 0);
        }
        const std::uint64_t* list = r.pull_list + view.first_resident;
        int at = static_cast<int>(blockIdx.x);
        if (at >= view.residents) continue;
        PullPiece next{load_resident(r, list, at), 0, min(row_bytes, C::kPullBytes), row_bytes <= C::kPullBytes};
        PullPiece before{};
        begin(next);
        for (bool more = true; more;) {
            const PullPiece piece = next;
            if (!piece.last) {
                next.offset += piece.bytes;
            } else {
                at += static_cast<int>(gridDim.x);
                more = at < view.residents;
                if (more) next = {load_resident(r, list, at), 0, 0, false};
            }
            if (more) {
                next.bytes = min(row_bytes - next.offset, C::kPullBytes);
                next.last = next.offset + next.bytes == row_bytes;
                maybe_delay(p.delay_seed, static_cast<std::uint32_t>(at));
                // The buffer's last stores have read it.
                ptx::bulk_wait_read<0>();
                __syncwarp();
                begin(next);
            }
            ptx::mbarrier_wait(shared.pulled(landing.at), landing.parity);
            if (lane < piece.from.rows) {
                const std::int64_t row = piece.from.slot + view.row_of_slot;
                ptx::bulk_store(p.x_pool + row * row_bytes + piece.offset, shared.pull_buffer(landing.at),
                                static_cast<std::uint32_t>(piece.bytes));
            }
            ptx::bulk_commit();
            landing.next();
            ptx::bulk_wait<1>();
            arrive(before);
            before = piece;
            tracer.end(TraceKind::kPull, chunk, 0, at);
        }
        ptx::bulk_wait<0>();
        arrive(before);
    }
}

}  // namespace mega_moe::device
