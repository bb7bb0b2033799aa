#include "host/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "host/make_status.h"

namespace mega_moe {
namespace {

static_assert(sizeof(layout::TensorMap) == sizeof(CUtensorMap), "the driver's size");
static_assert(alignof(layout::TensorMap) >= alignof(CUtensorMap), "the driver's alignment");

using Encode = decltype(&cuTensorMapEncodeTiled);

struct Encoder {
    Encode encode;
    Status status;
};

// Looked up at run time, so that nothing links against the driver.
Encoder find_encoder() noexcept {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = {};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    if (error != cudaSuccess) return {nullptr, cuda_status(error, "cudaGetDriverEntryPointByVersion")};
    if (found != cudaDriverEntryPointSuccess) {
        return {nullptr,
                error_status("the driver has no cuTensorMapEncodeTiled, which CUDA 12.0 introduced")};
    }
    return {reinterpret_cast<Encode>(function), ok_status()};
}

struct Element {
    CUtensorMapDataType type;
    cuuint32_t bytes;
    CUtensorMapSwizzle swizzle;
};
constexpr Element kBf16{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, CU_TENSOR_MAP_SWIZZLE_128B};
constexpr Element kE4m3{CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, CU_TENSOR_MAP_SWIZZLE_128B};
constexpr Element kScale{CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_NONE};

template <std::size_t Rank>
Status encode_map(const Element& element, const char* what, const void* data, std::int64_t rows,
                  std::int64_t columns, const cuuint64_t (&extents)[Rank],
                  const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank],
                  layout::TensorMap& map) noexcept {
    // Once, whichever thread comes first; a driver that lacks it will lack it in this process.
    static const Encoder encoder = find_encoder();
    if (encoder.encode == nullptr) return encoder.status;
    cuuint32_t steps[Rank];
    for (cuuint32_t& step : steps)
        step = 1;
    const CUresult result =
        encoder.encode(reinterpret_cast<CUtensorMap*>(&map), element.type, Rank, const_cast<void*>(data),
                       extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, element.swizzle,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return ok_status();
    return error_status("%s: cuTensorMapEncodeTiled of [%lld, %lld] at %p: error %d", what,
                        static_cast<long long>(rows), static_cast<long long>(columns), data,
                        static_cast<int>(result));
}

Status map_plane(const Element& element, const char* what, const void* data, std::int64_t rows,
                 std::int64_t columns, std::uint32_t box_rows, std::uint32_t box_columns,
                 layout::TensorMap& map) noexcept {
    const cuuint64_t extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * element.bytes};
    const cuuint32_t box[2] = {box_columns, box_rows};
    return encode_map<2>(element, what, data, rows, columns, extents, strides, box, map);
}

}  // namespace

Status map_rows(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                std::uint32_t box_rows, layout::TensorMap& map) noexcept {
    return map_plane(kBf16, what, data, rows, columns, box_rows, 128 / kBf16.bytes, map);
}

Status map_e4m3_rows(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                     std::uint32_t box_rows, layout::TensorMap& map) noexcept {
    return map_plane(kE4m3, what, data, rows, columns, box_rows, 128 / kE4m3.bytes, map);
}

Status map_scales(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                  std::uint32_t box_rows, std::uint32_t box_columns, layout::TensorMap& map) noexcept {
    return map_plane(kScale, what, data, rows, columns, box_rows, box_columns, map);
}

Status map_blocks(const char* what, const void* data, std::int64_t rows, std::int64_t columns,
                  std::uint32_t box_blocks, layout::TensorMap& map) noexcept {
    const cuuint64_t extents[3] = {64, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(columns) / 64};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * 2, 128};
    const cuuint32_t box[3] = {64, 64, box_blocks};
    return encode_map<3>(kBf16, what, data, rows, columns, extents, strides, box, map);
}

}  // namespace mega_moe
