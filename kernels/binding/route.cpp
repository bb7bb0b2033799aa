#include "mega_moe/route.h"

#include "binding/check.h"
#include "binding/ops.h"
#include "binding/route_arguments.h"
#include "binding/stream.h"

namespace mega_moe::binding {
namespace {

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

constexpr RouteShape kAnyShape{128, 1, 1, 8, 0, 1, 256, false, false, false, false, false, false};

}  // namespace

std::vector<int64_t> symmetric_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                                      bool quantize, bool home, bool canaries, int64_t backward) {
    return flattened(mega_moe::symmetric_layout(
        checked_shape(Checker("symmetric_layout"), max_tokens, top_k, num_experts, hidden, intermediate,
                      num_ranks, pool_rows, quantize, home, canaries, backward)));
}

std::vector<int64_t> workspace_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                                      bool quantize, bool home, bool canaries, int64_t backward) {
    return flattened(mega_moe::workspace_layout(
        checked_shape(Checker("workspace_layout"), max_tokens, top_k, num_experts, hidden, intermediate,
                      num_ranks, pool_rows, quantize, home, canaries, backward)));
}

std::string symmetric_parts() {
    return names(mega_moe::symmetric_layout(kAnyShape));
}

std::string workspace_parts() {
    return names(mega_moe::workspace_layout(kAnyShape));
}

void route(const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& summary,
           std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
           int64_t num_experts, int64_t hidden, int64_t intermediate, int64_t pool_rows, bool quantize,
           bool home, bool canaries, int64_t backward, int64_t rank, int64_t num_sms, int64_t arrival_ns,
           int64_t progress_ns, int64_t refused_tokens, bool weighted) {
    const Checker check("route");
    check.dims("topk_idx", topk_idx, 2);
    const RouteShape shape =
        checked_shape(check, max_tokens, topk_idx.size(1), num_experts, hidden, intermediate,
                      static_cast<int64_t>(buffers.size()), pool_rows, quantize, home, canaries, backward);
    check.range("refused_tokens", refused_tokens, 0, INT64_MAX);
    RouteProblem problem =
        checked_problem(check, shape, topk_idx, topk_weights, summary,
                        {buffers, workspace, record, rank, num_sms, arrival_ns, progress_ns}, weighted);
    if (refused_tokens > 0) problem.num_tokens = refused_tokens;
    problem.refuse = refused_tokens > 0;
    const torch::stable::accelerator::DeviceGuard guard(topk_idx.get_device_index());
    problem.stream = current_stream(problem.device);
    const Status status = launch_route(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
