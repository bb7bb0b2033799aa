#pragma once
#include <vector>

#include "binding/check.h"
#include "mega_moe/route.h"

// Arguments that the operators on a rank's buffer share, checked.
namespace mega_moe::binding {

// With pool_rows 0 replaced by the largest useful pool. `backward`: 0 without it, 1 in bf16, 2 in fp8.
RouteShape checked_shape(const Checker& check, int64_t max_tokens, int64_t top_k, int64_t num_experts,
                         int64_t hidden, int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                         bool quantize, bool home, bool canaries, int64_t backward);

// The numbers beside the tensors.
struct RankArguments {
    const std::vector<int64_t>& buffers;
    int64_t workspace;
    int64_t record;
    int64_t rank;
    int64_t num_sms;
    int64_t arrival_ns;
    int64_t progress_ns;
};

// All of the problem but its device, its stream, and whether it is weighted or refused. Tensors must be
// contiguous; the device comes last, so that a machine without a GPU can test every check.
RouteProblem checked_problem(const Checker& check, const RouteShape& shape, const Tensor& topk_idx,
                             const Tensor& topk_weights, const Tensor& summary, const RankArguments& rank,
                             bool weighted);

}  // namespace mega_moe::binding
