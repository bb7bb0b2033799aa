#include "bench/common/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "bench/common/check.h"

namespace mega_moe::bench {
namespace {

static_assert(sizeof(layout::TensorMap) == sizeof(CUtensorMap) &&
                  alignof(layout::TensorMap) >= alignof(CUtensorMap),
              "map");

// Looked up at run time, so that nothing links against the driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = {};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess)
        throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

layout::TensorMap encode(const void* data, MapElement element, cuuint32_t rank, const cuuint64_t* extents,
                         const cuuint64_t* strides, const cuuint32_t* box) {
    layout::TensorMap map = {};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result = encoder()(
        reinterpret_cast<CUtensorMap*>(&map),
        element == MapElement::kByte ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
        const_cast<void*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
    }
    return map;
}

}  // namespace

layout::TensorMap map_rows(const void* data, MapElement element, std::uint64_t rows, std::uint64_t columns,
                           std::uint32_t box_rows) {
    const std::uint32_t element_bytes = element == MapElement::kByte ? 1 : 2;
    const cuuint64_t extents[2] = {columns, rows};
    const cuuint64_t strides[1] = {columns * element_bytes};
    const cuuint32_t box[2] = {128 / element_bytes, box_rows};
    return encode(data, element, 2, extents, strides, box);
}

layout::TensorMap map_columns(const void* data, std::uint64_t depth, std::uint64_t columns,
                              std::uint32_t box_columns) {
    const cuuint64_t extents[3] = {64, depth, columns / 64};
    const cuuint64_t strides[2] = {columns * 2, 128};
    const cuuint32_t box[3] = {64, 64, box_columns / 64};
    return encode(data, MapElement::kBf16, 3, extents, strides, box);
}

}  // namespace mega_moe::bench
