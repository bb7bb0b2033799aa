#pragma once
#include <cstdint>

#include "layout/parts.h"
#include "layout/routing.h"
#include "layout/scale_rounding.h"
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

    // x of a forward is staged as e4m3.
    constexpr bool stages_e4m3() const { return mode.forward == Precision::kFp8; }
    // Bytes of an element of x at most. A backward stages x in bf16, whatever its precision, at the same
    // place; a buffer that only routes stages none.
    constexpr std::int64_t staged_element() const {
        if (mode.forward == Precision::kNone) return 0;
        return stages_e4m3() && !has_backward() ? 1 : 2;
    }
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
    kStagedX,           // bf16 [max_tokens, hidden]; e4m3 where only a forward in fp8 reads it
    kStagedScales,      // fp32 [max_tokens, hidden / 128]: scale factors of x in e4m3
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
    builder.add("staged_x", s.max_tokens * s.hidden * s.staged_element());
    builder.add("staged_scales", s.stages_e4m3() ? s.max_tokens * (s.hidden / kQuantGroup) * 4 : 0);
    builder.add("x_flags", returns ? flags : 0);
    builder.add("sent_flags", returns ? flags : 0);
    builder.add("owner_sums", returns ? s.max_tokens * s.num_ranks * s.hidden * 2 : 0);
    builder.add("staged_dy", returns && s.has_backward() ? s.max_tokens * s.hidden * 2 : 0);
    builder.add("owner_dtopk", returns && s.has_backward() ? slots * 4 : 0);
    return builder.finish();
}

}  // namespace mega_moe::layout
