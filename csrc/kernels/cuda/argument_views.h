// Tensors of an op as what kernels take.
#pragma once

#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "kernels/ops.h"

namespace llmserve::cuda {

inline Storage storage_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return Storage::kF32;
    case DType::kBF16:
      return Storage::kBF16;
    case DType::kF8E4M3:
      return Storage::kF8;
    default:
      return Storage::kF16;  // validated: there is no other
  }
}

inline Rows rows_of(const Tensor& tensor) { return {tensor.as<float>(), tensor.strides[0]}; }
inline ConstRows rows_of(const ConstTensor& tensor) {
  return {tensor.as<float>(), tensor.strides[0]};
}

inline CachePart part_of(const Tensor& part) {
  return {part.data, part.shape[1], part.shape[2], part.shape[3], part.strides[1], part.strides[2]};
}

inline void check_layout(const char* op, const PagedKvCache& cache) {
  if (cache.key_layout != KeyLayout::kRows)
    throw NotSupported(concat("cuda ", op, ": keys in panels are not supported"));
}

// Blocks along x, one a row or one a head of a token.
inline void check_grid(const char* op, int64_t blocks) {
  if (blocks > kMaxGridX)
    throw InvalidArgument(concat(op, ": expected at most ", kMaxGridX,
                                 " rows (or heads of tokens) a call, got ", blocks));
}

}  // namespace llmserve::cuda
