#pragma once
#include <cmath>
#include <cstdint>

#include "device/epilogue/quantise_rows.cuh"
#include "device/epilogue/store_rows.cuh"
#include "device/epilogue/swiglu.cuh"
#include "device/mma/multiply_promoted.cuh"
#include "device/role/forward_schedule.cuh"
#include "device/role/layer_math.cuh"

namespace mega_moe::device {

// The other one is kept to be measured against it.
inline constexpr Promotion kForwardPromotion = Promotion::kQuarters;

// A tile's stages as multiply_blocks takes them, for one warp.
template <class C>
struct QuantisedStages {
    const LayerShared<C>& shared;
    RingCursor<C::kStages>& stage;  // the next that is opened
    Unpublished& unpublished;
    int lane;
    int closing;              // the stage that is closed next
    std::uint32_t rows;       // offset of the warpgroup's rows in a stage
    std::uint32_t row_scale;  // offset of the thread's first row among the tile's scale factors
    int x_scales;             // buffer of the current scale factors of x; below 0: those are of h
    int k_block = 0;
    int left;  // k-blocks after this one
    WeightScales columns;
    float current[2];  // of the columns, of the current k-block

    __device__ __forceinline__ StageOperands open() {
        ptx::mbarrier_wait(shared.full(stage.at), stage.parity);
        const StageOperands at{operand_descriptor<Major::kK>(shared.a(stage.at) + rows),
                               operand_descriptor<Major::kK>(shared.b(stage.at))};
        stage.next();
        return at;
    }
    __device__ __forceinline__ BlockScales scales() {
        const std::uint32_t from =
            row_scale + (x_scales < 0 ? shared.h_scales(closing)
                                      : shared.x_scales((x_scales + k_block / layout::kScaleBlocks) % 2) +
                                            k_block % layout::kScaleBlocks * 4);
        const std::uint32_t eight_rows = x_scales < 0 ? 32 : 32 * layout::kScaleBlocks;
        BlockScales s{{ptx::load_shared(from), ptx::load_shared(from + eight_rows)},
                      {current[0], current[1]}};
        // One ahead: a load from global memory takes as long as a pass.
        if (--left >= 0) {
            current[0] = __ldg(++columns.first);
            current[1] = __ldg(++columns.second);
        }
        // The warpgroups take turns: while one waits for its stores to be seen, the other's products go on.
        if (k_block == (rows == 0 ? kPublishBlock : kPublishBlock + 1)) unpublished.publish(lane);
        ++k_block;
        return s;
    }
    __device__ __forceinline__ void close() {
        release_stage<C>(shared, closing, lane);
        closing = closing + 1 == C::kStages ? 0 : closing + 1;
    }
};

// A warpgroup without rows passes the stages of a tile on.
template <class C>
__device__ __forceinline__ void pass_tile(const LayerShared<C>& shared, RingCursor<C::kStages>& stage,
                                          int k_blocks, Unpublished& unpublished, int lane) {
    for (int k_block = 0; k_block < k_blocks; ++k_block, stage.next()) {
        unpublished.wait(shared.full(stage.at), stage.parity, lane);
        release_stage<C>(shared, stage.at, lane);
    }
}

// What a warp needs of a tile while it multiplies. The rest is read again from the record, which it keeps for
// so long: beside the sums there are no registers for it.
struct TileInput {
    std::int32_t kind;
    std::int32_t k_blocks;
    std::int32_t slot;
    std::int32_t rows;
    std::int32_t weight_row;
    std::int32_t weight_row_2;
    float first_scales[2];
};

__device__ __forceinline__ TileInput tile_input(const TileRecord& t) {
    return {t.kind,
            t.k_blocks,
            t.slot,
            t.rows,
            t.weight_row,
            t.weight_row_2,
            {t.first_scales[0], t.first_scales[1]}};
}

template <class C>
__device__ __forceinline__ void trace_end(Tracer<C::kTrace>& tracer, TraceKind kind, const TileRecord& t,
                                          int first_row) {
    tracer.end(kind, t.chunk, t.expert, trace_index(t, first_row));
}

// One warp: stores its part of a tile, which is then told by `unpublished`.
template <class C>
__device__ __forceinline__ void store_quantised_tile(const ForwardParams& p, const LayerShared<C>& shared,
                                                     const TileRecord& t, int math_warp, float (&d)[128],
                                                     float lane_weight, Unpublished& unpublished, int lane) {
    const int first_row = math_warp / 4 * layout::kRowBlock;
    const int warp_row = first_row + math_warp % 4 * 16;
    const std::uint32_t buffer = shared.store_buffer(math_warp);
    // A tile may have too few k-blocks to have told of the one before on the way.
    unpublished.publish(lane);
    unpublished.counter = p.counters + (t.slot + first_row) / layout::kRowBlock;
    if (t.kind == kDownTile) {
        const std::int64_t row_bytes = std::int64_t{p.hidden} * 2;
        store_rows_directly<4>(d, p.o_pool + (t.pool_row + warp_row) * row_bytes + t.column * 2, row_bytes,
                               buffer, lane);
        unpublished.counter += p.down_done;
        return;
    }
    const float weight[2] = {__shfl_sync(ptx::kAllLanes, lane_weight, lane / 4),
                             __shfl_sync(ptx::kAllLanes, lane_weight, lane / 4 + 8)};
    if (p.clamp < INFINITY)
        swiglu_tile<true, false>(d, weight, p.clamp);
    else
        swiglu_tile<false, false>(d, weight, p.clamp);
    const std::int64_t group =
        std::int64_t{t.pool_row} / layout::kTileRows * (p.intermediate / layout::kQuantGroup) +
        t.column_block;
    quantise_rows(d, weight, &p.h_store, buffer, shared.store_scales(math_warp), t.column,
                  t.pool_row + warp_row, p.h_scales + group * layout::kHScaleBytes + warp_row * 4, lane);
    unpublished.counter += p.gate_up_done;
}

// One warpgroup: its part of this CTA's tiles.
template <class C>
__device__ __forceinline__ void multiply_quantised_tiles(const ForwardParams& p, const LayerShared<C>& shared,
                                                         Tracer<C::kTrace>& tracer) {
    const int lane = static_cast<int>(ptx::lane_id());
    const int math_warp = static_cast<int>(ptx::from_lane(ptx::thread_id() / 32, 0)) - 4;
    const int first_row = math_warp / 4 * layout::kRowBlock;  // of the tile
    const int warp_row = first_row + math_warp % 4 * 16;
    const std::uint32_t zero = ptx::opaque_zero();
    int x_scales = 0;
    RingCursor<C::kStages> stage;
    RingCursor<C::kRing> ring;
    Unpublished unpublished;
    tracer.start();
    for (;; ring.next()) {
        unpublished.wait(shared.ring_full(ring.at), ring.parity, lane);
        const auto record = [&] { return *reinterpret_cast<const TileRecord*>(shared.record(ring.at)); };
        const auto release_record = [&] {
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(shared.ring_empty(ring.at));
        };
        const TileInput t = tile_input(record());
        if (t.kind == kNoTile) break;
        const bool down = t.kind == kDownTile;
        const int first_x_scales = x_scales;
        if (!down) x_scales = (x_scales + t.k_blocks / layout::kScaleBlocks) % 2;
        if (t.rows <= first_row) {
            release_record();
            pass_tile<C>(shared, stage, t.k_blocks, unpublished, lane);
            continue;
        }
        const WeightScales columns = weight_scales(p, down, t.weight_row, t.weight_row_2, t.k_blocks);
        QuantisedStages<C> stages{
            shared,
            stage,
            unpublished,
            lane,
            stage.at,
            static_cast<std::uint32_t>(first_row * kOperandRowBytes),
            static_cast<std::uint32_t>(warp_row + lane / 4) * (down ? 4 : layout::kScaleBlocks * 4),
            down ? -1 : first_x_scales,
            0,
            t.k_blocks - 1,
            columns,
            {t.first_scales[0], t.first_scales[1]}};
        // Of the warp's row that has the lane's number.
        float lane_weight = 0.0f;
        if (!down && lane < 16 && warp_row + lane < t.rows)
            lane_weight = __uint_as_float(static_cast<std::uint32_t>(
                ptx::load_relaxed_gpu(p.route.slots + t.slot + warp_row + lane) >> 32));
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; ++i)
            d[i] = 0.0f;
        unpublished.wait(shared.full(stage.at), stage.parity, lane);
        trace_end<C>(tracer, TraceKind::kWaitTurn, record(), first_row);
        multiply_promoted<kForwardPromotion>(d, t.k_blocks, zero, stages);
        const TileRecord tile = record();
        release_record();
        trace_end<C>(tracer, down ? TraceKind::kDown : TraceKind::kGateUp, tile, first_row);
        store_quantised_tile<C>(p, shared, tile, math_warp, d, lane_weight, unpublished, lane);
        trace_end<C>(tracer, down ? TraceKind::kStoreDown : TraceKind::kStoreGateUp, tile, first_row);
    }
    unpublished.publish(lane);
}

}  // namespace mega_moe::device
