#include "binding/rank.h"

#include <algorithm>
#include <string>

#include "binding/stream.h"
#include "mega_moe/limits.h"

namespace mega_moe::binding {
namespace {

Precision precision(const Checker& check, const char* name, int64_t word) {
    check.range(name, word, 0, static_cast<int64_t>(Precision::kFp8));
    return static_cast<Precision>(word);
}

Mode unpack_mode(const Checker& check, const Words& words) {
    const Mode mode{precision(check, "forward precision", words[kForwardPrecision]),
                    precision(check, "backward precision", words[kBackwardPrecision]),
                    precision(check, "wgrad precision", words[kWgradPrecision]),
                    static_cast<ScaleFormat>(words[kScaleFormat])};
    check.range("scale format", words[kScaleFormat], 0, static_cast<int64_t>(ScaleFormat::kPowerOfTwo));
    if (mode.backward != Precision::kNone && mode.forward == Precision::kNone)
        check.fail("backward precision is given without a forward precision");
    if ((mode.wgrad == Precision::kNone) != (mode.backward == Precision::kNone))
        check.fail("wgrad precision and backward precision must both be given or both be none");
    if (mode.wgrad == Precision::kFp8 && mode.backward != Precision::kFp8)
        check.fail("wgrad precision is fp8, must be bf16 where the backward precision is not fp8");
    return mode;
}

void check_multiples(const Checker& check, const BufferShape& shape, Direction direction) {
    const Multiples multiples = layer_multiples(shape.mode, direction);
    check.multiple("hidden", shape.hidden, multiples.hidden);
    check.multiple("intermediate", shape.intermediate, multiples.intermediate);
}

}  // namespace

BufferShape unpack_shape(const Checker& check, const Words& words) {
    if (words.size() < kShapeWords)
        check.fail("shape has " + std::to_string(words.size()) + " words, must have " +
                   std::to_string(kShapeWords));
    BufferShape shape{words[kMaxTokens],    words[kTopK],     words[kNumExperts], words[kHidden],
                      words[kIntermediate], words[kNumRanks], words[kPoolRows],   unpack_mode(check, words),
                      words[kCanaries] != 0};
    check.range("max_tokens", shape.max_tokens, 1, kMaxTokensPerRank);
    check.range("top_k", shape.top_k, 1, kMaxTopK);
    check.range("num_experts", shape.num_experts, 1, kMaxExperts);
    check.range("hidden", shape.hidden, 1, kMaxHidden);
    check.range("num_ranks", shape.num_ranks, 1, kMaxRanks);
    check.multiple("num_experts", shape.num_experts, shape.num_ranks);
    const bool layer = shape.mode.forward != Precision::kNone;
    check.range("intermediate", shape.intermediate, layer ? 1 : 0, layer ? kMaxIntermediate : 0);
    check.multiple("hidden", shape.hidden, 8);  // 16 bytes of bf16
    if (layer) check_multiples(check, shape, Direction::kForward);
    if (shape.mode.backward != Precision::kNone) check_multiples(check, shape, Direction::kBackward);
    const int64_t largest = largest_pool_rows(shape);
    if (shape.pool_rows == 0) shape.pool_rows = largest;
    check.range("pool_rows", shape.pool_rows, smallest_pool_rows(shape), largest);
    // A tile's scale factors are one run.
    if (shape.mode.forward == Precision::kFp8 || shape.mode.backward == Precision::kFp8)
        check.multiple("pool_rows", shape.pool_rows, 128);
    return shape;
}

RankCall unpack_call(const Checker& check, const Words& words, Operands& operands, const Tensor& topk_idx,
                     const MaybeTensor& topk_weights, const Tensor& summary) {
    const BufferShape shape = unpack_shape(check, words);
    const int64_t want = kRankWords + shape.num_ranks;
    if (static_cast<int64_t>(words.size()) != want)
        check.fail("rank has " + std::to_string(words.size()) + " words, must have " + std::to_string(want));
    check.dims("topk_idx", topk_idx, 2);
    const int64_t num_tokens = topk_idx.size(0);
    check.range("number of tokens", num_tokens, 0, shape.max_tokens);
    check.range("rank", words[kRank], 0, shape.num_ranks - 1);
    check.range("num_sms", words[kNumSms], 0, 1 << 16);
    check.range("arrival_ns", words[kArrivalNs], 1, INT64_MAX);
    check.range("progress_ns", words[kProgressNs], 1, INT64_MAX);
    const int64_t* buffers = words.data() + kRankWords;
    for (int64_t i = 0; i < shape.num_ranks; ++i) {
        const std::string name = "buffers[" + std::to_string(i) + "]";
        if (buffers[i] == 0)
            check.fail(name + " is a null address: this rank cannot reach rank " + std::to_string(i));
        check.aligned(name.c_str(), static_cast<std::uintptr_t>(buffers[i]), 256);
    }
    if (words[kWorkspace] == 0) check.fail("workspace is a null address, must be an address on the device");
    check.aligned("workspace", static_cast<std::uintptr_t>(words[kWorkspace]), 256);
    if (words[kRecord] == 0) check.fail("record is a null address, must be of pinned host memory");
    check.aligned("record", static_cast<std::uintptr_t>(words[kRecord]), 8);

    RankCall call{};
    call.shape = shape;
    call.inputs.topk_idx = operands.input("topk_idx", topk_idx, {ScalarType::Int, ScalarType::Long},
                                          {num_tokens, shape.top_k}, kByElement);
    if (topk_weights.has_value()) {
        call.inputs.topk_weights =
            operands.input("topk_weights", *topk_weights, {ScalarType::Float, ScalarType::BFloat16},
                           {num_tokens, shape.top_k}, kByElement);
        call.weights_are_bf16 = topk_weights->scalar_type() == ScalarType::BFloat16;
        call.weighted = true;
    }
    call.summary = static_cast<int32_t*>(
        operands.result("summary", summary, {ScalarType::Int}, {summary_length(shape)}, kByElement));
    call.buffers = buffers;
    call.workspace = reinterpret_cast<void*>(static_cast<std::uintptr_t>(words[kWorkspace]));
    call.record = reinterpret_cast<void*>(static_cast<std::uintptr_t>(words[kRecord]));
    call.num_tokens = num_tokens;
    call.rank = words[kRank];
    call.num_sms = words[kNumSms];
    call.arrival_ns = words[kArrivalNs];
    call.progress_ns = words[kProgressNs];
    call.idx_is_64_bit = topk_idx.scalar_type() == ScalarType::Long;
    return call;
}

void place_call(const Checker& check, const Operands& operands, const Tensor& topk_idx, RankCall& call) {
    check.cuda("topk_idx", topk_idx);
    operands.on_device_of(topk_idx);
    call.device = topk_idx.get_device_index();
    call.stream = current_stream(call.device);
}

}  // namespace mega_moe::binding
