#include "mega_moe/route.h"

#include "binding/check.h"
#include "binding/ops.h"
#include "binding/stream.h"
#include "mega_moe/limits.h"

namespace mega_moe::binding {
namespace {

RouteShape checked_shape(const Checker& check, int64_t max_tokens, int64_t top_k, int64_t num_experts,
                         int64_t hidden, int64_t num_ranks, int64_t pool_rows, bool quantise, bool home,
                         bool canaries) {
    check.range("max_tokens", max_tokens, 1, kMaxTokensPerRank);
    check.range("top_k", top_k, 1, kMaxTopK);
    check.range("num_experts", num_experts, 1, kMaxExperts);
    check.range("hidden", hidden, 1, kMaxHidden);
    check.multiple(quantise ? "hidden (quantised)" : "hidden", hidden, quantise ? 128 : 8);
    check.range("num_ranks", num_ranks, 1, kMaxRanks);
    check.multiple("num_experts", num_experts, num_ranks);
    RouteShape shape{max_tokens, top_k, num_experts, hidden, num_ranks, pool_rows, quantise, home, canaries};
    const int64_t largest = largest_pool_rows(shape);
    if (pool_rows == 0) shape.pool_rows = largest;
    check.range("pool_rows", shape.pool_rows, smallest_pool_rows(shape), largest);
    return shape;
}

std::vector<int64_t> flattened(const LayoutTable& table) {
    std::vector<int64_t> numbers;
    for (int i = 0; i < table.count; ++i) {
        numbers.push_back(table.parts[i].offset);
        numbers.push_back(table.parts[i].bytes);
    }
    numbers.push_back(table.total);
    return numbers;
}

std::string names(const LayoutTable& table) {
    std::string text;
    for (int i = 0; i < table.count; ++i)
        text += (i > 0 ? " " : "") + std::string(table.parts[i].name);
    return text;
}

constexpr RouteShape kAnyShape{128, 1, 1, 8, 1, 256, false, false, false};

}  // namespace

std::vector<int64_t> symmetric_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t num_ranks, int64_t pool_rows, bool quantise, bool home,
                                      bool canaries) {
    return flattened(
        mega_moe::symmetric_layout(checked_shape(Checker("symmetric_layout"), max_tokens, top_k, num_experts,
                                                 hidden, num_ranks, pool_rows, quantise, home, canaries)));
}

std::vector<int64_t> workspace_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t num_ranks, int64_t pool_rows, bool quantise, bool home,
                                      bool canaries) {
    return flattened(
        mega_moe::workspace_layout(checked_shape(Checker("workspace_layout"), max_tokens, top_k, num_experts,
                                                 hidden, num_ranks, pool_rows, quantise, home, canaries)));
}

std::string symmetric_parts() {
    return names(mega_moe::symmetric_layout(kAnyShape));
}

std::string workspace_parts() {
    return names(mega_moe::workspace_layout(kAnyShape));
}

void route(const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& summary,
           std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
           int64_t num_experts, int64_t hidden, int64_t pool_rows, bool quantise, bool home, bool canaries,
           int64_t rank, int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, int64_t refused_tokens,
           bool weighted) {
    const Checker check("route");
    check.dims("topk_idx", topk_idx, 2);
    check.dtype("topk_idx", topk_idx, {ScalarType::Int, ScalarType::Long});
    check.dims("topk_weights", topk_weights, 2);
    check.dtype("topk_weights", topk_weights, {ScalarType::Float, ScalarType::BFloat16});
    const int64_t num_tokens = topk_idx.size(0);
    const int64_t top_k = topk_idx.size(1);
    const auto num_ranks = static_cast<int64_t>(buffers.size());
    const RouteShape shape = checked_shape(check, max_tokens, top_k, num_experts, hidden, num_ranks,
                                           pool_rows, quantise, home, canaries);
    check.range("number of tokens", num_tokens, 0, max_tokens);
    if (weighted) {
        check.size("topk_weights", topk_weights, 0, num_tokens);
        check.size("topk_weights", topk_weights, 1, top_k);
    }
    check.dims("summary", summary, 1);
    check.dtype("summary", summary, {ScalarType::Int});
    check.size("summary", summary, 0, route_summary_length(shape));
    check.range("rank", rank, 0, num_ranks - 1);
    check.range("num_sms", num_sms, 0, 1 << 16);
    check.range("arrival_ns", arrival_ns, 1, INT64_MAX);
    check.range("progress_ns", progress_ns, 1, INT64_MAX);
    check.range("refused_tokens", refused_tokens, 0, INT64_MAX);
    for (size_t i = 0; i < buffers.size(); ++i) {
        const std::string name = "buffers[" + std::to_string(i) + "]";
        if (buffers[i] == 0)
            check.fail(name + " is a null address: this rank cannot reach rank " + std::to_string(i));
        check.aligned(name.c_str(), static_cast<std::uintptr_t>(buffers[i]), 256);
    }
    if (workspace == 0) check.fail("workspace is a null address, must be an address on the device");
    check.aligned("workspace", static_cast<std::uintptr_t>(workspace), 256);
    if (record == 0) check.fail("record is a null address, must be of pinned host memory");
    check.aligned("record", static_cast<std::uintptr_t>(record), 8);
    check.contiguous("topk_idx", topk_idx);
    check.contiguous("topk_weights", topk_weights);
    check.contiguous("summary", summary);
    // The device comes last, so that a machine without a GPU can test every check above.
    check.cuda("topk_idx", topk_idx);
    check.same_device("topk_weights", topk_weights, topk_idx);
    check.same_device("summary", summary, topk_idx);

    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    RouteProblem problem{};
    problem.shape = shape;
    problem.topk_idx = topk_idx.const_data_ptr();
    problem.topk_weights = topk_weights.const_data_ptr();
    problem.summary = static_cast<int32_t*>(summary.mutable_data_ptr());
    problem.buffers = buffers.data();
    problem.workspace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(workspace));
    problem.record = reinterpret_cast<void*>(static_cast<std::uintptr_t>(record));
    problem.num_tokens = refused_tokens > 0 ? refused_tokens : num_tokens;
    problem.rank = rank;
    problem.num_sms = num_sms;
    problem.arrival_ns = arrival_ns;
    problem.progress_ns = progress_ns;
    problem.idx_is_64_bit = topk_idx.scalar_type() == ScalarType::Long;
    problem.weights_are_bf16 = topk_weights.scalar_type() == ScalarType::BFloat16;
    problem.weighted = weighted;
    problem.refuse = refused_tokens > 0;
    problem.device = topk_idx.get_device_index();
    problem.stream = current_stream(problem.device);
    const Status status = launch_route(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
