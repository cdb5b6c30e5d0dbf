#include "kernels/cuda/tensor_maps.h"

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace llmserve::cuda {

std::optional<TensorMaps> TensorMaps::find(std::string& problem) {
  constexpr unsigned kSinceVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t code = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kSinceVersion, cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
    problem = "the driver has no cuTensorMapEncodeTiled";
    cudaGetLastError();
    return std::nullopt;
  }
  return TensorMaps(reinterpret_cast<Encode>(function));
}

CUtensorMap TensorMaps::rows(const void* data, int64_t rows, int64_t columns, int box_rows) const {
  const auto n = static_cast<cuuint64_t>(rows);
  const auto k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {k, n};
  const cuuint64_t strides[] = {k * 2};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return make(data, 2, sizes, strides, box);
}

CUtensorMap TensorMaps::halves(const void* data, int64_t rows, int64_t columns,
                               int box_rows) const {
  const auto half = static_cast<cuuint64_t>(rows / 2);
  const auto k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {k, 8, 2, half / 8};
  const cuuint64_t strides[] = {k * 2, half * k * 2, k * 16};
  const cuuint32_t box[] = {kBoxColumns, 8, 2, static_cast<cuuint32_t>(box_rows / 16)};
  return make(data, 4, sizes, strides, box);
}

CUtensorMap TensorMaps::make(const void* data, uint32_t rank, const cuuint64_t* sizes,
                             const cuuint64_t* strides, const cuuint32_t* box) const {
  constexpr cuuint32_t kNoGaps[] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode_(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes, strides,
              box, kNoGaps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw NotSupported(concat("cuTensorMapEncodeTiled failed with CUresult ", int{result}));
  return map;
}

}  // namespace llmserve::cuda
