#pragma once
#include <cstdint>

#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/schedule/backward_tile.cuh"
#include "device/sm90/epilogue/transpose_rows.cuh"
#include "layout/gradient_operands.h"

// Where the math warps make the operands of the weights' gradients in e4m3: a warp has 16 rows of a tile of
// 128, and the scale factors are of all 128, so the warps of a tile find them together.
namespace mega_moe::device::sm90 {

template <class C>
class GradientOperands {
  public:
    // `warps`: of the tile, 4 where it has no more than a warpgroup's rows.
    __device__ __forceinline__ GradientOperands(const layout::BackwardParams& params, const Smem<C>& map,
                                                const BackwardTile& tile, int math_warp, int warps)
        : p(params),
          shared(map),
          row_block_(tile.pool_row / layout::kTransposedEdge),
          math_warp_(math_warp),
          warps_(warps),
          lane_(static_cast<int>(ptx::lane_id_anew())) {}

    // Stores a tile of dz as its warpgroups hold it: gradients of gate and up, and h. No copy may still
    // read the warps' buffers, as below.
    __device__ __forceinline__ void store_dz(const float (&dg)[64], const float (&du)[64],
                                             const std::uint32_t (&h)[32], int column) const {
        store_column_maxima(FloatValues{dg}, buffer(), lane_);
        store_column_maxima(FloatValues{du}, buffer() + kColumns * 4, lane_);
        share_largest(h, 0);
        sync();
        find_factors(2 * kColumns, [&](int at) {
            return at < kColumns ? column + at : p.intermediate + column + at - kColumns;
        });
        const float h_scale = largest_scale(0);
        if (math_warp_ == 0 && lane_ == 0)
            ptx::store(scales() + scale_row().h() +
                           layout::GradientScales::of_block(column / layout::kTransposedEdge),
                       h_scale);
        sync();
        store(FloatValues{dg}, column_factors(0), p.dz_pool, column, 2 * p.intermediate);
        store(FloatValues{du}, column_factors(kColumns), p.dz_pool, p.intermediate + column,
              2 * p.intermediate);
        store(WordValues{h}, one_factor(h_scale), p.h_pool, column, p.intermediate);
    }
    // Stores zeros for a warpgroup without rows, in a tile that has some.
    __device__ __forceinline__ void store_zeros(int column) const {
        store_zero_slab(slab(p.dz_pool, column, 2 * p.intermediate), lane_);
        store_zero_slab(slab(p.dz_pool, p.intermediate + column, 2 * p.intermediate), lane_);
        store_zero_slab(slab(p.h_pool, column, p.intermediate), lane_);
    }
    // 128 columns of x or dy in bf16; `buffer` is 0 and 1 alternately.
    __device__ __forceinline__ void store_x(const std::uint32_t (&words)[32], int column, int buffer) const {
        share_largest(words, buffer);
        sync();
        const float scale = largest_scale(buffer);
        if (math_warp_ == 0 && lane_ == 0)
            ptx::store(scales() + scale_row().x() +
                           layout::GradientScales::of_block(column / layout::kTransposedEdge),
                       scale);
        store(WordValues{words}, one_factor(scale), p.x_transposed, column, p.hidden);
    }
    __device__ __forceinline__ void store_dy(const std::uint32_t (&words)[32], int column) const {
        // The codes before must have left the buffer.
        __syncwarp();
        store_column_maxima(WordValues{words}, buffer(), lane_);
        sync();
        find_factors(kColumns, [&](int at) { return scale_row().dy() + column + at; });
        sync();
        store(WordValues{words}, column_factors(0), p.dy_transposed, column, p.hidden);
    }

  private:
    static constexpr int kColumns = layout::kTransposedEdge;

    __device__ __forceinline__ std::uint32_t buffer() const { return shared.store_buffer(math_warp_); }
    __device__ __forceinline__ layout::GradientScales scale_row() const { return {p.hidden, p.intermediate}; }
    __device__ __forceinline__ float* scales() const {
        return p.gradient_scales + std::int64_t{row_block_} * scale_row().length();
    }
    __device__ __forceinline__ std::byte* slab(std::byte* pool, int column, int columns) const {
        return pool +
               layout::transposed_block(std::int64_t{row_block_} * layout::kTransposedEdge, column, columns) +
               math_warp_ * layout::kSlabBytes;
    }
    // A warpgroup that is alone may be a tile behind the other.
    __device__ __forceinline__ void sync() const {
        if (warps_ == C::kMathWarps)
            ptx::sync_threads<ptx::kBothWarpgroups>(32 * C::kMathWarps);
        else
            ptx::sync_threads<ptx::kFirstWarpgroup>(32 * C::kMathWarps / 2);
    }

    __device__ __forceinline__ void share_largest(const std::uint32_t (&words)[32], int buffer) const {
        const float amax = largest_of_words(words);
        if (lane_ == 0) ptx::store_shared(shared.amax(buffer) + math_warp_ * 4, amax);
    }
    __device__ __forceinline__ float largest_scale(int buffer) const {
        float amax = 0.0f;
        for (int warp = 0; warp < warps_; ++warp)
            amax = ptx::max_abs_nan(amax, ptx::load_shared(shared.amax(buffer) + warp * 4));
        return make_gradient_scale(amax, p.rounding);
    }
    // Each thread those of one column or two, of what the warps have left in their buffers.
    template <class ScaleAt>
    __device__ __forceinline__ void find_factors(int columns, const ScaleAt& scale_at) const {
        for (int at = 32 * math_warp_ + lane_; at < columns; at += 32 * warps_) {
            float amax = 0.0f;
            for (int warp = 0; warp < warps_; ++warp)
                amax = ptx::max_abs_nan(amax, ptx::load_shared(shared.store_buffer(warp) + at * 4));
            const float scale = make_gradient_scale(amax, p.rounding);
            ptx::store_shared(shared.factors() + at * 4, reciprocal_rn(scale));
            ptx::store(scales() + scale_at(at), scale);
        }
    }
    struct ColumnFactors {
        std::uint32_t from;
        __device__ __forceinline__ float2 operator()(int i) const {
            return ptx::load_shared_pair(from + i * 32);
        }
    };
    __device__ __forceinline__ ColumnFactors column_factors(int first) const {
        return {shared.factors() + first * 4 + lane_ % 4 * 8};
    }
    struct OneFactor {
        float factor;
        __device__ __forceinline__ float2 operator()(int) const { return {factor, factor}; }
    };
    static __device__ __forceinline__ OneFactor one_factor(float scale) { return {reciprocal_rn(scale)}; }

    template <class Values, class Factors>
    __device__ __forceinline__ void store(const Values& v, const Factors& factors, std::byte* pool,
                                          int column, int columns) const {
        store_slab([&] { stage_slab(v, factors, buffer(), lane_); }, slab(pool, column, columns), buffer(),
                   lane_);
    }

    const layout::BackwardParams& p;
    const Smem<C>& shared;
    int row_block_;
    int math_warp_;
    int warps_;
    int lane_;
};

// One warp's 16 rows x 128 columns of a stage that holds 128 rows of a bf16 pool, as boxes of 64 rows x two
// blocks of 64 columns; zeros beyond `rows` of them. In the order of WordValues.
__device__ __forceinline__ void load_slab_words(std::uint32_t (&words)[32], std::uint32_t stage,
                                                int math_warp, int rows, int lane) {
    constexpr int kBoxBytes = 2 * layout::kRowBlock * kOperandRowBytes;
    const int row = math_warp % 4 * 16 + lane % 16;
    const std::uint32_t from = stage + math_warp / 4 * kBoxBytes + row * kOperandRowBytes;
    const int last = rows - math_warp * 16 - lane / 4;
    const std::uint32_t mask[2] = {last > 0 ? 0xFFFFFFFFu : 0, last > 8 ? 0xFFFFFFFFu : 0};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int chunk = (i % 8 + lane / 16) ^ (row % 8);
        std::uint32_t m[4];
        ptx::ldmatrix_x4(from + i / 8 * layout::kRowBlock * kOperandRowBytes + chunk * 16, m);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            words[2 * i + j] = m[j] & mask[j % 2];
    }
}

}  // namespace mega_moe::device::sm90
