// Rows of keys and values: where they lie, what they hold, and how they are written.
#pragma once

#include "kernels/cuda/device_math.cuh"

namespace llmserve::cuda {

// Where a block's rows of a head begin, in elements: int64, since a pool has more than 2^31 of them
// soon.
__device__ __forceinline__ int64_t head_offset(const CachePart& part, int64_t block, int64_t head) {
  return (block * part.num_heads + head) * part.head_stride;
}

// Where the row of a position begins in one half of the cache, in elements.
__device__ __forceinline__ int64_t row_offset(const CachePart& part, const int32_t* block_table,
                                              int64_t head, int32_t position) {
  const auto block_size = static_cast<int32_t>(part.block_size);
  const int64_t block = block_table[position / block_size];
  return head_offset(part, block, head) + position % block_size * part.row_stride;
}

// The scales of a block and head in f8.
__device__ __forceinline__ float* head_scales(const CachePart& part, int64_t block, int64_t head) {
  return reinterpret_cast<float*>(static_cast<uint8_t*>(part.data) +
                                  head_offset(part, block, head) +
                                  part.block_size * part.row_stride);
}
__device__ __forceinline__ float row_scale(const CachePart& part, const int32_t* block_table,
                                           int64_t head, int32_t position) {
  const auto block_size = static_cast<int32_t>(part.block_size);
  return head_scales(part, block_table[position / block_size], head)[position % block_size];
}

// The row of a position, element by element.
template <Storage kStorage>
struct CacheRow {
  const void* data;
  int64_t begin;
  float scale;

  __device__ __forceinline__ CacheRow(const CachePart& part, const int32_t* block_table,
                                      int64_t head, int32_t position)
      : data(part.data), begin(row_offset(part, block_table, head, position)), scale(1.0f) {
    if constexpr (kStorage == Storage::kF8) scale = row_scale(part, block_table, head, position);
  }
  __device__ __forceinline__ float operator[](int64_t i) const {
    const float x = load<kStorage>(data, begin + i);
    return kStorage == Storage::kF8 ? x * scale : x;
  }
};

// Writes a head's x [width] to a slot, if it is one: StoreKvArgs of ops.h. A whole warp must call
// it.
template <Storage kStorage>
__device__ __forceinline__ void store_row(const CachePart& part, int64_t slot, int64_t head,
                                          const float* x) {
  if (slot < 0) return;
  const int lane = threadIdx.x % 32;
  const int64_t block = slot / part.block_size;
  const int64_t offset = slot % part.block_size;
  const int64_t to = head_offset(part, block, head) + offset * part.row_stride;
  if constexpr (kStorage != Storage::kF8) {
    for (int64_t i = lane; i < part.width; i += 32) store<kStorage>(part.data, to + i, x[i]);
  } else {
    int32_t largest = 0;
    for (int64_t i = lane; i < part.width; i += 32) {
      const int32_t magnitude = v_bits(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const int32_t other = __shfl_xor_sync(kAllLanes, largest, distance);
      largest = other > largest ? other : largest;
    }
    const float scale = v_fp8_scale(largest);
    const bool is_finite = largest < 0x7f800000;
    const float inverse = 1.0f / scale;  // exact: a power of two
    auto* codes = static_cast<uint8_t*>(part.data) + to;
    for (int64_t i = lane; i < part.width; i += 32)
      codes[i] = is_finite ? static_cast<uint8_t>(v_to_fp8(x[i] * inverse)) : uint8_t{0};
    if (lane == 0) head_scales(part, block, head)[offset] = scale;
  }
}

}  // namespace llmserve::cuda
