#include <torch/csrc/stable/accelerator.h>

#include "binding/check.h"
#include "binding/operands.h"
#include "binding/ops.h"
#include "binding/rank.h"
#include "mega_moe/layer.h"

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

// The names of the parts do not depend on it.
constexpr BufferShape kAnyShape{128, 1, 1, 8, 0, 1, 256, {}, false};

}  // namespace

std::vector<int64_t> symmetric_layout(Words shape) {
    return flattened(mega_moe::symmetric_layout(unpack_shape(Checker("symmetric_layout"), shape)));
}

std::vector<int64_t> workspace_layout(Words shape) {
    return flattened(mega_moe::workspace_layout(unpack_shape(Checker("workspace_layout"), shape)));
}

std::string symmetric_parts() {
    return names(mega_moe::symmetric_layout(kAnyShape));
}

std::string workspace_parts() {
    return names(mega_moe::workspace_layout(kAnyShape));
}

void route(const Tensor& topk_idx, MaybeTensor topk_weights, const Tensor& summary, Words rank,
           int64_t refused_tokens) {
    const Checker check("route");
    Operands operands(check);
    check.range("refused_tokens", refused_tokens, 0, INT64_MAX);
    RankCall call = unpack_call(check, rank, operands, topk_idx, topk_weights, summary);
    if (refused_tokens > 0) call.num_tokens = refused_tokens;
    call.refuse = refused_tokens > 0;
    place_call(check, operands, topk_idx, call);
    const torch::stable::accelerator::DeviceGuard guard(call.device);
    const Status status = launch_route(call);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
