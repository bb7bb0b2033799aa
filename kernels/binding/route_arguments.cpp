#include "binding/route_arguments.h"

#include "mega_moe/limits.h"

namespace mega_moe::binding {

RouteShape checked_shape(const Checker& check, int64_t max_tokens, int64_t top_k, int64_t num_experts,
                         int64_t hidden, int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                         bool quantize, bool home, bool canaries, int64_t backward) {
    check.range("max_tokens", max_tokens, 1, kMaxTokensPerRank);
    check.range("top_k", top_k, 1, kMaxTopK);
    check.range("num_experts", num_experts, 1, kMaxExperts);
    check.range("hidden", hidden, 1, kMaxHidden);
    check.multiple(quantize ? "hidden (quantized)" : "hidden", hidden, quantize ? 128 : 8);
    check.range("intermediate", intermediate, 0, kMaxIntermediate);
    check.range("num_ranks", num_ranks, 1, kMaxRanks);
    check.multiple("num_experts", num_experts, num_ranks);
    check.range("backward", backward, 0, 3);
    if (backward > 0) check.multiple("intermediate (backward)", intermediate, 128);
    if (backward > 0) check.multiple("hidden (backward)", hidden, 256);
    RouteShape shape{max_tokens, top_k, num_experts, hidden,       intermediate,  num_ranks,    pool_rows,
                     quantize,   home,  canaries,    backward > 0, backward >= 2, backward == 3};
    const int64_t largest = largest_pool_rows(shape);
    if (pool_rows == 0) shape.pool_rows = largest;
    check.range("pool_rows", shape.pool_rows, smallest_pool_rows(shape), largest);
    return shape;
}

RouteProblem checked_problem(const Checker& check, const RouteShape& shape, const Tensor& topk_idx,
                             const Tensor& topk_weights, const Tensor& summary, const RankArguments& rank,
                             bool weighted) {
    check.dims("topk_idx", topk_idx, 2);
    check.dtype("topk_idx", topk_idx, {ScalarType::Int, ScalarType::Long});
    check.dims("topk_weights", topk_weights, 2);
    check.dtype("topk_weights", topk_weights, {ScalarType::Float, ScalarType::BFloat16});
    const int64_t num_tokens = topk_idx.size(0);
    check.range("number of tokens", num_tokens, 0, shape.max_tokens);
    if (weighted) {
        check.size("topk_weights", topk_weights, 0, num_tokens);
        check.size("topk_weights", topk_weights, 1, shape.top_k);
    }
    check.dims("summary", summary, 1);
    check.dtype("summary", summary, {ScalarType::Int});
    check.size("summary", summary, 0, route_summary_length(shape));
    check.range("rank", rank.rank, 0, shape.num_ranks - 1);
    check.range("num_sms", rank.num_sms, 0, 1 << 16);
    check.range("arrival_ns", rank.arrival_ns, 1, INT64_MAX);
    check.range("progress_ns", rank.progress_ns, 1, INT64_MAX);
    for (size_t i = 0; i < rank.buffers.size(); ++i) {
        const std::string name = "buffers[" + std::to_string(i) + "]";
        if (rank.buffers[i] == 0)
            check.fail(name + " is a null address: this rank cannot reach rank " + std::to_string(i));
        check.aligned(name.c_str(), static_cast<std::uintptr_t>(rank.buffers[i]), 256);
    }
    if (rank.workspace == 0) check.fail("workspace is a null address, must be an address on the device");
    check.aligned("workspace", static_cast<std::uintptr_t>(rank.workspace), 256);
    if (rank.record == 0) check.fail("record is a null address, must be of pinned host memory");
    check.aligned("record", static_cast<std::uintptr_t>(rank.record), 8);
    check.contiguous("topk_idx", topk_idx);
    check.contiguous("topk_weights", topk_weights);
    check.contiguous("summary", summary);
    check.cuda("topk_idx", topk_idx);
    check.same_device("topk_weights", topk_weights, topk_idx);
    check.same_device("summary", summary, topk_idx);

    RouteProblem problem{};
    problem.shape = shape;
    problem.topk_idx = topk_idx.const_data_ptr();
    problem.topk_weights = topk_weights.const_data_ptr();
    problem.summary = static_cast<int32_t*>(summary.mutable_data_ptr());
    problem.buffers = rank.buffers.data();
    problem.workspace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(rank.workspace));
    problem.record = reinterpret_cast<void*>(static_cast<std::uintptr_t>(rank.record));
    problem.num_tokens = num_tokens;
    problem.rank = rank.rank;
    problem.num_sms = rank.num_sms;
    problem.arrival_ns = rank.arrival_ns;
    problem.progress_ns = rank.progress_ns;
    problem.idx_is_64_bit = topk_idx.scalar_type() == ScalarType::Long;
    problem.weights_are_bf16 = topk_weights.scalar_type() == ScalarType::BFloat16;
    problem.weighted = weighted;
    problem.device = topk_idx.get_device_index();
    return problem;
}

}  // namespace mega_moe::binding
