#include "mega_moe/quantize_weights.h"

#include "host/launch.h"
#include "host/make_status.h"
#include "layout/quantize_weights_params.h"
#include "layout/weight_block.h"

namespace mega_moe {

Status launch_quantize_weights(const QuantizeWeightsProblem& problem) noexcept {
    DeviceFacts facts{};
    const Variant* variant = nullptr;
    const Status status =
        prepare_launch({Op::kQuantizeWeights, Precision::kFp8}, problem.device, facts, variant);
    // A grid of no blocks is an error of the runtime; there is nothing to make.
    if (!status.ok || problem.num_experts == 0) return status;

    layout::QuantizeWeightsParams params{};
    params.weight = static_cast<const std::byte*>(problem.weight);
    params.codes = static_cast<std::byte*>(problem.codes);
    params.codes_transposed = static_cast<std::byte*>(problem.codes_t);
    params.scales = static_cast<float*>(problem.scales);
    params.row_blocks = static_cast<std::uint32_t>(problem.rows / layout::kWeightBlock);
    params.column_blocks = static_cast<std::uint32_t>(problem.columns / layout::kWeightBlock);
    params.rounding = layout::scale_rounding(problem.scale_format == ScaleFormat::kPowerOfTwo);
    const std::int64_t blocks = problem.num_experts * params.row_blocks * params.column_blocks;
    return launch_variant(*variant, variant->facts(), static_cast<unsigned>(blocks), 0, &params,
                          problem.stream);
}

}  // namespace mega_moe
