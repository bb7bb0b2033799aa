#include "mega_moe/quantize_weights.h"

#include <torch/csrc/stable/accelerator.h>

#include "binding/check.h"
#include "binding/operands.h"
#include "binding/ops.h"
#include "binding/stream.h"
#include "mega_moe/limits.h"

namespace mega_moe::binding {

void quantize_weights(const Tensor& weight, MaybeTensor codes, MaybeTensor codes_t, const Tensor& scales,
                      bool power_of_two) {
    constexpr int64_t kBlock = 128;
    constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;
    const Checker check("quantize_weights");
    check.dims("weight", weight, 3);
    const int64_t experts = weight.size(0);
    const int64_t rows = weight.size(1);
    const int64_t columns = weight.size(2);
    check.range("number of experts", experts, 0, kMaxExperts);
    check.range("rows of an expert", rows, 1, 2 * kMaxIntermediate);
    check.range("columns of an expert", columns, 1, kMaxHidden);
    check.multiple("rows of an expert", rows, kBlock);
    check.multiple("columns of an expert", columns, kBlock);
    Operands operands(check);
    QuantizeWeightsProblem problem{};
    problem.weight = operands.input("weight", weight, {ScalarType::BFloat16}, {experts, rows, columns});
    problem.codes = operands.result("codes", codes, {kE4m3}, {experts, rows, columns});
    problem.codes_t = operands.result("codes_t", codes_t, {kE4m3}, {experts, columns, rows});
    problem.scales =
        operands.result("scales", scales, {ScalarType::Float}, {experts, rows / kBlock, columns / kBlock});
    problem.num_experts = experts;
    problem.rows = rows;
    problem.columns = columns;
    problem.scale_format = power_of_two ? ScaleFormat::kPowerOfTwo : ScaleFormat::kFp32;
    check.cuda("weight", weight);
    operands.on_device_of(weight);
    problem.device = weight.get_device_index();
    problem.stream = current_stream(problem.device);
    const torch::stable::accelerator::DeviceGuard guard(problem.device);
    const Status status = launch_quantize_weights(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
