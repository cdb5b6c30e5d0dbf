// Rows in fours of neighbouring floats: 16 bytes at once where rows lie so, one by one otherwise;
// the same elements in the same order.
#pragma once

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {

struct Four {
  float at[4];
};

#ifdef __CUDACC__
// One store: the compiler takes some assignments of these apart into stores of 4 bytes.
__device__ __forceinline__ void store_whole(float4* to, const float4& x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_whole(uint2* to, const uint2& x) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
#else
template <class T>
void store_whole(T* to, const T& x) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) std::abort();  // as a GPU would
  *to = x;
}
#endif

// The same of rows.
inline bool is_aligned(const Rows& rows) { return is_aligned(rows.data, rows.stride); }
inline bool is_aligned(const ConstRows& rows) { return is_aligned(rows.data, rows.stride); }

// Elements i … i + 3 of a row of `width`; 0 beyond its end. i is a multiple of 4, and so is an
// aligned row's width.
template <bool kIsAligned>
__device__ __forceinline__ Four load_four(const float* row, int64_t i, int64_t width) {
  Four four{};
  if constexpr (kIsAligned) {
    if (i >= width) return four;
    const float4 bits = *reinterpret_cast<const float4*>(row + i);
    four = {{bits.x, bits.y, bits.z, bits.w}};
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < width) four.at[j] = row[i + j];
  }
  return four;
}

template <bool kIsAligned>
__device__ __forceinline__ void store_four(float* row, int64_t i, int64_t width, const Four& four) {
  if constexpr (kIsAligned) {
    const float4 bits = {four.at[0], four.at[1], four.at[2], four.at[3]};
    if (i < width) store_whole(reinterpret_cast<float4*>(row + i), bits);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < width) row[i + j] = four.at[j];
  }
}

// Likewise, rounded to bf16; an aligned row begins at a multiple of 8 bytes.
template <bool kIsAligned>
__device__ __forceinline__ void store_four(uint16_t* row, int64_t i, int64_t width,
                                           const Four& four) {
  if constexpr (kIsAligned) {
    if (i >= width) return;
    uint32_t half[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) half[j] = float_to_bf16(four.at[j]);
    const uint2 bits = {half[0] | half[1] << 16, half[2] | half[3] << 16};
    store_whole(reinterpret_cast<uint2*>(row + i), bits);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < width) row[i + j] = float_to_bf16(four.at[j]);
  }
}

}  // namespace llmserve::cuda
