// Where keys and values lie.
#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.cuh"

namespace llmserve::cuda {

// Where the row of a position begins in one half of the cache, in elements: int64, since a pool has
// more than 2^31 of them soon.
__device__ __forceinline__ int64_t row_offset(const CachePart& part, const int32_t* block_table,
                                              int64_t head, int32_t position) {
  const auto block_size = static_cast<int32_t>(part.block_size);
  const int64_t block = block_table[position / block_size];
  return ((block * part.num_heads + head) * part.block_size + position % block_size) * part.width;
}

}  // namespace llmserve::cuda
