#include "host/route_params.h"

#include <algorithm>
#include <cstddef>

#include "host/launch.h"
#include "host/make_status.h"
#include "layout/record.h"
#include "layout/route_shared.h"
#include "layout/symmetric.h"
#include "layout/workspace.h"
#include "mega_moe/limits.h"

namespace mega_moe {
namespace {

static_assert(layout::kMaxSlotsPerToken == kMaxTopK);
static_assert(layout::kHeaderTokens == kMaxTokensPerRank);
static_assert(layout::kMaxRanks == kMaxRanks);

template <int Count>
LayoutTable table_of(const layout::Layout<Count>& layout) noexcept {
    static_assert(Count <= kMaxLayoutParts);
    LayoutTable table{};
    for (const layout::Part& part : layout.parts)
        table.parts[table.count++] = {part.name, part.offset, part.bytes};
    table.total = layout.total;
    return table;
}

}  // namespace

layout::SymmetricShape symmetric_shape(const BufferShape& s) noexcept {
    return {s.max_tokens, s.top_k, s.hidden, s.num_ranks, s.mode, s.canaries};
}

layout::WorkspaceShape workspace_shape(const BufferShape& s) noexcept {
    return {s.max_tokens, s.top_k,        s.num_local(), s.num_ranks, s.pool_rows,
            s.hidden,     s.intermediate, s.mode,        s.canaries};
}

LayoutTable symmetric_layout(const BufferShape& shape) noexcept {
    return table_of(layout::make_symmetric(symmetric_shape(shape)));
}

LayoutTable workspace_layout(const BufferShape& shape) noexcept {
    return table_of(layout::make_workspace(workspace_shape(shape)));
}

std::int64_t smallest_pool_rows(const BufferShape& shape) noexcept {
    return layout::pad_rows(workspace_shape(shape).smallest_pool());
}

std::int64_t largest_pool_rows(const BufferShape& shape) noexcept {
    return layout::pad_rows(workspace_shape(shape).largest_pool());
}

std::int64_t summary_length(const BufferShape& shape) noexcept {
    return layout::summary_length(shape.num_local(), shape.num_ranks);
}

layout::RouteParams make_route_params(const RankCall& call) noexcept {
    const BufferShape& shape = call.shape;
    const auto symmetric = layout::make_symmetric(symmetric_shape(shape));
    const layout::WorkspaceShape local = workspace_shape(shape);
    const auto workspace = layout::make_workspace(local);
    auto* base = static_cast<std::byte*>(call.workspace);
    const auto at = [&](layout::WorkspacePart part) { return base + workspace[part]; };

    layout::RouteParams p{};
    for (std::int64_t rank = 0; rank < shape.num_ranks; ++rank)
        p.endpoint.peers[rank] =
            reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(call.buffers[rank]));
    std::byte* own = p.endpoint.peers[call.rank];
    p.endpoint.control = reinterpret_cast<std::uint64_t*>(own + symmetric[layout::kControlWords]);
    p.endpoint.sync = reinterpret_cast<std::uint64_t*>(at(layout::kSync));
    p.endpoint.record = static_cast<std::uint64_t*>(call.record);
    p.endpoint.control_offset = symmetric[layout::kControlWords];
    p.endpoint.arrival_ns = call.arrival_ns;
    p.endpoint.progress_ns = call.progress_ns;
    p.endpoint.rank = static_cast<std::int32_t>(call.rank);
    p.endpoint.num_ranks = static_cast<std::int32_t>(shape.num_ranks);
    p.topk_idx = call.inputs.topk_idx;
    p.topk_weights = call.inputs.topk_weights;
    p.summary = call.summary;
    p.headers = symmetric[layout::kHeaders];
    p.block_flags = symmetric[layout::kBlockFlags];
    p.ids = symmetric[layout::kPublishedIds];
    p.ids_bank = symmetric.parts[layout::kPublishedIds].bytes / 2;
    p.weights = symmetric[layout::kPublishedWeights];
    p.weights_bank = symmetric.parts[layout::kPublishedWeights].bytes / 2;
    p.group_counts = reinterpret_cast<std::uint32_t*>(at(layout::kGroupCounts));
    p.cta_counts = reinterpret_cast<std::uint32_t*>(at(layout::kCtaCounts));
    p.block_counts = reinterpret_cast<std::uint32_t*>(at(layout::kBlockCounts));
    p.chunk_table = reinterpret_cast<std::int32_t*>(at(layout::kChunkTable));
    p.expert_rows = reinterpret_cast<std::int32_t*>(at(layout::kExpertRows));
    p.expert_slots = reinterpret_cast<std::int32_t*>(at(layout::kExpertSlots));
    p.pull_starts = reinterpret_cast<std::int32_t*>(at(layout::kPullStarts));
    p.push_starts = reinterpret_cast<std::int32_t*>(at(layout::kPushStarts));
    p.slots = reinterpret_cast<std::uint64_t*>(at(layout::kSlots));
    p.slot_list = reinterpret_cast<std::uint32_t*>(at(layout::kSlotList));
    p.pull_list = reinterpret_cast<std::uint64_t*>(at(layout::kPullList));
    p.push_list = reinterpret_cast<std::uint64_t*>(at(layout::kPushList));
    p.num_tokens = static_cast<std::int32_t>(call.num_tokens);
    p.top_k = static_cast<std::int32_t>(shape.top_k);
    p.num_experts = static_cast<std::int32_t>(shape.num_experts);
    p.num_local = static_cast<std::int32_t>(local.num_local);
    p.max_tokens = static_cast<std::int32_t>(shape.max_tokens);
    p.max_blocks = static_cast<std::int32_t>(layout::num_blocks(shape.max_tokens));
    p.chunk_limit = local.limit();
    p.most_in_one = local.most_in_one();
    p.one_chunk = local.chunks() == 1;
    p.idx_is_64_bit = call.idx_is_64_bit;
    p.weights_are_bf16 = call.weights_are_bf16;
    p.weighted = call.weighted;
    p.refuse = call.refuse;
    return p;
}

Status launch_route(const RankCall& call) noexcept {
    DeviceFacts facts{};
    const Variant* variant = nullptr;
    const Status status = prepare_launch({Op::kRoute}, call.device, facts, variant);
    if (!status.ok) return status;
    if (call.num_sms > facts.num_sms) {
        return error_status("num_sms is %lld, must be at most the device's %d",
                            static_cast<long long>(call.num_sms), facts.num_sms);
    }
    const layout::KernelFacts kernel = variant->facts();
    layout::RouteParams params = make_route_params(call);
    const std::int64_t sms = call.num_sms == 0 ? facts.num_sms : call.num_sms;
    const std::int64_t shared =
        layout::make_route_shared(kernel.threads, params.endpoint.num_ranks, params.num_local,
                                  params.max_blocks, params.one_chunk)
            .total;
    if (shared > facts.max_shared_bytes) {
        return error_status(
            "%lld experts per rank and %lld tokens need %lld bytes of shared memory, the device has %d",
            static_cast<long long>(params.num_local), static_cast<long long>(params.max_tokens),
            static_cast<long long>(shared), facts.max_shared_bytes);
    }
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(sms, layout::kMaxCtas));
    return launch_cooperative(*variant, kernel, blocks, static_cast<int>(shared), &params, call.stream);
}

}  // namespace mega_moe
