#pragma once
#include <cstdint>

#include "layout/layer_params.h"
#include "layout/pools.h"

namespace mega_moe::device {

// What a pass over the tokens of a chunk does: bring whole rows to all slots of a token; or, where they are
// quantized as they arrive, first the codes to all slots and the row to one, then the row from there to the
// others. e4m3 GEMMs wait for the codes, wgrad for what is twice as long and read much later.
enum class PullPass { kWhole, kCodes, kSpread };

// Whether the codes' pass brings the row itself to one slot: with EP=1 it is near enough to be read again.
__device__ __forceinline__ bool keeps_row(const layout::LayerParams& p) {
    return p.spreads_rows && p.route.endpoint.num_ranks > 1;
}

// What slot number `slot` of a token adds to the counter of arrived rows.
template <PullPass Pass>
__device__ __forceinline__ std::uint32_t arrival(const layout::LayerParams& p, int slot) {
    if constexpr (Pass == PullPass::kWhole) return 1;
    if constexpr (Pass == PullPass::kCodes) return slot == 0 && keeps_row(p) ? 1 + layout::kBf16RowThere : 1;
    return layout::kBf16RowThere;
}

}  // namespace mega_moe::device
