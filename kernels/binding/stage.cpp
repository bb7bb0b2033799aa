#include "mega_moe/stage.h"

#include "binding/check.h"
#include "binding/ops.h"
#include "binding/stream.h"
#include "mega_moe/limits.h"

namespace mega_moe::binding {
namespace {

void check_extents(const Checker& check, int64_t max_tokens, int64_t top_k, int64_t hidden, bool quantize) {
    check.range("max_tokens", max_tokens, 1, kMaxTokensPerRank);
    check.range("top_k", top_k, 1, kMaxTopK);
    check.range("hidden", hidden, 1, kMaxHidden);
    check.multiple(quantize ? "hidden (quantized)" : "hidden", hidden, quantize ? 128 : 8);
}

}  // namespace

std::vector<int64_t> staging_layout(int64_t max_tokens, int64_t top_k, int64_t hidden, bool quantize) {
    check_extents(Checker("staging_layout"), max_tokens, top_k, hidden, quantize);
    const StagingOffsets offsets = staging_offsets(max_tokens, top_k, hidden, quantize);
    return {offsets.x, offsets.x_sf, offsets.topk_idx, offsets.topk_weights, offsets.error, offsets.total};
}

void stage(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, int64_t buffer,
           int64_t buffer_bytes, int64_t max_tokens, int64_t num_experts, bool quantize, bool power_of_two) {
    const Checker check("stage");
    check.dims("x", x, 2);
    check.dtype("x", x, {ScalarType::BFloat16});
    const int64_t num_tokens = x.size(0);
    check.dims("topk_idx", topk_idx, 2);
    check.dtype("topk_idx", topk_idx, {ScalarType::Int, ScalarType::Long});
    check.size("topk_idx", topk_idx, 0, num_tokens);
    check.dims("topk_weights", topk_weights, 2);
    check.dtype("topk_weights", topk_weights, {ScalarType::Float, ScalarType::BFloat16});
    check.size("topk_weights", topk_weights, 0, num_tokens);
    check.size("topk_weights", topk_weights, 1, topk_idx.size(1));
    check_extents(check, max_tokens, topk_idx.size(1), x.size(1), quantize);
    check.range("number of tokens", num_tokens, 0, max_tokens);
    check.range("num_experts", num_experts, 1, kMaxExperts);
    if (power_of_two && !quantize) check.fail("power_of_two is true, must be false without quantize");
    const int64_t needed = staging_offsets(max_tokens, topk_idx.size(1), x.size(1), quantize).total;
    if (buffer_bytes < needed) {
        check.fail("buffer_bytes is " + std::to_string(buffer_bytes) + ", must be at least " +
                   std::to_string(needed));
    }
    if (buffer == 0) check.fail("buffer is a null address, must be an address on the device");
    check.aligned("buffer", static_cast<std::uintptr_t>(buffer), 256);
    check.contiguous("x", x);
    check.contiguous("topk_idx", topk_idx);
    check.contiguous("topk_weights", topk_weights);
    check.aligned("x", reinterpret_cast<std::uintptr_t>(x.const_data_ptr()), 16);
    // The device comes last, so that a machine without a GPU can test every check above.
    check.cuda("x", x);
    check.same_device("topk_idx", topk_idx, x);
    check.same_device("topk_weights", topk_weights, x);

    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    StageProblem problem{};
    problem.x = x.const_data_ptr();
    problem.topk_idx = topk_idx.const_data_ptr();
    problem.topk_weights = topk_weights.const_data_ptr();
    problem.buffer = reinterpret_cast<void*>(static_cast<std::uintptr_t>(buffer));
    problem.num_tokens = num_tokens;
    problem.max_tokens = max_tokens;
    problem.hidden = x.size(1);
    problem.top_k = topk_idx.size(1);
    problem.num_experts = num_experts;
    problem.idx_is_64_bit = topk_idx.scalar_type() == ScalarType::Long;
    problem.weights_are_bf16 = topk_weights.scalar_type() == ScalarType::BFloat16;
    problem.quantize = quantize;
    problem.power_of_two = power_of_two;
    problem.device = x.get_device_index();
    problem.stream = current_stream(problem.device);
    const Status status = launch_stage(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
