#include "mega_moe/quantize_weights.h"

#include "binding/check.h"
#include "binding/operand.h"
#include "binding/ops.h"
#include "binding/stream.h"
#include "mega_moe/limits.h"

namespace mega_moe::binding {
namespace {

constexpr int64_t kBlock = 128;

}  // namespace

void quantize_weights(const Tensor& weight, const Tensor& codes, const Tensor& codes_transposed,
                      const Tensor& scales, bool power_of_two) {
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
    check_operand(check, "weight", weight, {ScalarType::BFloat16}, {experts, rows, columns});
    if (is_wanted(codes))
        check_operand(check, "codes", codes, {ScalarType::Float8_e4m3fn}, {experts, rows, columns});
    if (is_wanted(codes_transposed))
        check_operand(check, "codes_transposed", codes_transposed, {ScalarType::Float8_e4m3fn},
                      {experts, columns, rows});
    check_operand(check, "scales", scales, {ScalarType::Float}, {experts, rows / kBlock, columns / kBlock});
    // The device comes last, so that a machine without a GPU can test every check above.
    check.cuda("weight", weight);
    QuantizeWeightsProblem problem{};
    if (is_wanted(codes)) {
        check.same_device("codes", codes, weight);
        problem.codes = codes.mutable_data_ptr();
    }
    if (is_wanted(codes_transposed)) {
        check.same_device("codes_transposed", codes_transposed, weight);
        problem.codes_transposed = codes_transposed.mutable_data_ptr();
    }
    check.same_device("scales", scales, weight);

    const torch::stable::accelerator::DeviceGuard guard(weight.get_device_index());
    problem.weight = weight.const_data_ptr();
    problem.scales = scales.mutable_data_ptr();
    problem.num_experts = experts;
    problem.rows = rows;
    problem.columns = columns;
    problem.power_of_two = power_of_two;
    problem.device = weight.get_device_index();
    problem.stream = current_stream(problem.device);
    const Status status = launch_quantize_weights(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
