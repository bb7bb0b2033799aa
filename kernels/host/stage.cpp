#include "mega_moe/stage.h"

#include <cstddef>

#include "host/launch.h"
#include "host/make_status.h"
#include "layout/stage_params.h"
#include "layout/staging.h"

namespace mega_moe {
namespace {

unsigned blocks_for(std::int64_t items, std::int64_t items_per_block) noexcept {
    return static_cast<unsigned>((items + items_per_block - 1) / items_per_block);
}

}  // namespace

StagingOffsets staging_offsets(std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden,
                               bool quantize) noexcept {
    const layout::Staging s = layout::make_staging(max_tokens, top_k, hidden, quantize);
    return {s.x, s.x_sf, s.topk_idx, s.topk_weights, s.error, s.total};
}

Status launch_stage(const StageProblem& problem) noexcept {
    DeviceFacts facts{};
    const Variant* variant = nullptr;
    const Precision precision = problem.quantize ? Precision::kFp8 : Precision::kBf16;
    const Status status = prepare_launch({Op::kStage, precision}, problem.device, facts, variant);
    // A grid of no blocks is an error of the runtime; there is nothing to copy.
    if (!status.ok || problem.num_tokens == 0) return status;

    const layout::KernelFacts kernel = variant->facts();
    const layout::Staging s =
        layout::make_staging(problem.max_tokens, problem.top_k, problem.hidden, problem.quantize);
    std::byte* buffer = static_cast<std::byte*>(problem.buffer);
    const std::int64_t num_slots = problem.num_tokens * problem.top_k;
    layout::StageParams params{};
    params.x = problem.x;
    params.staged_x = buffer + s.x;
    params.staged_sf = reinterpret_cast<float*>(buffer + s.x_sf);
    params.topk_idx = problem.topk_idx;
    params.topk_weights = problem.topk_weights;
    params.staged_idx = reinterpret_cast<std::uint16_t*>(buffer + s.topk_idx);
    params.staged_weights = reinterpret_cast<float*>(buffer + s.topk_weights);
    params.error = reinterpret_cast<std::int32_t*>(buffer + s.error);
    params.num_vectors = problem.num_tokens * problem.hidden / 8;
    params.num_groups =
        problem.quantize ? static_cast<std::uint32_t>(params.num_vectors * 8 / layout::kQuantGroup) : 0;
    params.num_slots = static_cast<std::uint32_t>(num_slots);
    params.num_slot_blocks = blocks_for(num_slots, std::int64_t{kernel.threads} * layout::kSlotsPerThread);
    params.top_k = static_cast<std::uint32_t>(problem.top_k);
    params.num_experts = static_cast<std::int32_t>(problem.num_experts);
    params.rounding = layout::scale_rounding(problem.power_of_two);
    params.idx_is_64_bit = problem.idx_is_64_bit;
    params.weights_are_bf16 = problem.weights_are_bf16;
    const unsigned x_blocks =
        blocks_for(params.num_vectors, std::int64_t{kernel.threads} * variant->vectors_per_thread);
    return launch_variant(*variant, kernel, params.num_slot_blocks + x_blocks, 0, &params, problem.stream);
}

}  // namespace mega_moe
