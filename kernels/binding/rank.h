#pragma once
#include <vector>

#include "binding/operands.h"
#include "mega_moe/layer.h"

// A rank's buffer as Python packs it, `Shape.words` and `KernelRank.words`: every number that a launch needs
// in addition to its tensors, in the order of the words below.
namespace mega_moe::binding {

using Words = std::vector<int64_t>;

enum ShapeWord {
    kMaxTokens,
    kTopK,
    kNumExperts,
    kHidden,
    kIntermediate,
    kNumRanks,
    kPoolRows,  // 0: the largest useful pool, one chunk for any routing
    kForwardPrecision,
    kBackwardPrecision,
    kWgradPrecision,
    kScaleFormat,
    kCanaries,
    kShapeWords
};

// Behind the words of the shape; then the addresses of the symmetric buffers, one a rank.
enum RankWord { kRank = kShapeWords, kNumSms, kArrivalNs, kProgressNs, kWorkspace, kRecord, kRankWords };

BufferShape unpack_shape(const Checker& check, const Words& words);

// All but the device and the stream. `words` must outlive the call. The ids and weights are checked against
// the shape; without weights the slots get none.
RankCall unpack_call(const Checker& check, const Words& words, Operands& operands, const Tensor& topk_idx,
                     const MaybeTensor& topk_weights, const Tensor& summary);

// Completes the call: every operand must be on the GPU that holds the ids. The last check, since CPUs end
// here.
void place_call(const Checker& check, const Operands& operands, const Tensor& topk_idx, RankCall& call);

}  // namespace mega_moe::binding
