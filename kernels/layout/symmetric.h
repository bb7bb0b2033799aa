#pragma once
#include <cstdint>

#include "layout/parts.h"
#include "layout/routing.h"
#include "layout/staging.h"
#include "mega_moe/mode.h"

namespace mega_moe::layout {

// A rank's part of the symmetric buffer: what its peers read and write. All ranks have the same layout.
struct SymmetricShape {
    std::int64_t max_tokens;
    std::int64_t top_k;
    std::int64_t hidden;
    std::int64_t num_ranks;
    Mode mode;
    bool canaries;

    // x is staged as e4m3.
    constexpr bool stages_e4m3() const { return mode.forward == Precision::kFp8; }
    // With what the layer's kernels return to other ranks; of the backward last, so that nothing else moves.
    constexpr bool returns_rows() const { return mode.forward != Precision::kNone && num_ranks > 1; }
    constexpr bool has_backward() const { return mode.backward != Precision::kNone; }
};

enum SymmetricPart {
    kControlWords,  // uint64: the words of ControlWord, zero at first
    kHeaders,       // uint64 [2][num_ranks]: what each rank said of launch n, in bank n % 2; zero at first
    kBlockFlags,    // uint64 [num_ranks][max_blocks]: launch whose ids of the block are published; zero
    kPublishedIds,  // uint16 [2][max_tokens, top_k]: expert ids of launch n in bank n % 2
    kPublishedWeights,  // fp32 [2][max_tokens, top_k]
    kStaging,           // layout/staging.h
    kXFlags,      // uint64 [num_ranks][max_blocks]: launch whose x of the block the rank has staged; zero
    kSentFlags,   // uint64 [num_ranks][max_blocks]: launch whose sums of the block the rank has sent; zero
    kOwnerSums,   // bf16 [max_tokens, num_ranks, hidden]: sums that ranks send to a token
    kStagedDy,    // bf16 [max_tokens, hidden]
    kOwnerDtopk,  // fp32 [max_tokens, top_k]: gradients of routing weights, each from its expert's rank
    kSymmetricParts
};

enum ControlWord {
    kEpochWord,  // number of the last launch of this rank that passed its grid barrier
    kAbortWord,  // not zero: a rank gave up; see encode_abort
    kControlWordCount
};

// The backward of a layer whose forward stages x as e4m3 stages it in bf16, at the same place.
constexpr std::int64_t staging_bytes(const SymmetricShape& s) {
    const std::int64_t bytes = make_staging(s.max_tokens, s.top_k, s.hidden, s.stages_e4m3()).total;
    const std::int64_t plain = make_staging(s.max_tokens, s.top_k, s.hidden, false).total;
    return s.stages_e4m3() && s.has_backward() && plain > bytes ? plain : bytes;
}

constexpr Layout<kSymmetricParts> make_symmetric(const SymmetricShape& s) {
    const std::int64_t slots = s.max_tokens * s.top_k;
    const bool returns = s.returns_rows();
    const std::int64_t flags = s.num_ranks * num_blocks(s.max_tokens) * 8;
    LayoutBuilder<kSymmetricParts> builder(s.canaries);
    builder.add("control", kControlWordCount * 8);
    builder.add("headers", 2 * s.num_ranks * 8);
    builder.add("block_flags", flags);
    builder.add("published_ids", 2 * align_part(slots * 2));
    builder.add("published_weights", 2 * align_part(slots * 4));
    builder.add("staging", staging_bytes(s));
    builder.add("x_flags", returns ? flags : 0);
    builder.add("sent_flags", returns ? flags : 0);
    builder.add("owner_sums", returns ? s.max_tokens * s.num_ranks * s.hidden * 2 : 0);
    builder.add("staged_dy", returns && s.has_backward() ? s.max_tokens * s.hidden * 2 : 0);
    builder.add("owner_dtopk", returns && s.has_backward() ? slots * 4 : 0);
    return builder.finish();
}

}  // namespace mega_moe::layout
