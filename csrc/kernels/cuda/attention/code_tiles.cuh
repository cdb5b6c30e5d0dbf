// Products with keys and values in f8 that lie in shared memory as codes and become bf16 in the
// registers of the lane that multiplies them: the numbers of widen_half, in the places of the
// fragments where tiles in bf16 have them, and so the same bits. A tile takes half the memory, and
// nothing is written to it but what was copied.
#pragma once

#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

// From row to row of codes, in bytes: as in tiled_stride, an odd number of 16.
template <int kDim>
constexpr int kCodeStride = tiled_code_stride(kDim);

// Of the lanes' scales of 32 positions, one a lane: those of a product's columns as pairs, column g
// (lane / 4) of n positions from 8 n on.
__device__ __forceinline__ void key_factors(float scale, uint32_t (&factors)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float factor = __shfl_sync(kAllLanes, scale, n * 8 + threadIdx.x % 32 / 4);
    factors[n] = pack_bf16(factor, factor);
  }
}
// Those of a product's rows: 2t, 2t + 1 and 8 more, of 16 positions from 16 n on.
__device__ __forceinline__ void value_factors(float scale, uint32_t (&factors)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = n * 16 + i * 8 + threadIdx.x % 4 * 2;
      const float low = __shfl_sync(kAllLanes, scale, first);
      const float high = __shfl_sync(kAllLanes, scale, first + 1);
      factors[n][i] = pack_bf16(low, high);
    }
  }
}

// Two neighbouring codes as bf16.
__device__ __forceinline__ uint32_t widen_pair(uint32_t codes, uint32_t factors) {
  return widen_codes(__byte_perm(codes, 0, 0x1404), factors);
}

// scores() of 32 positions, two pairs of 8.
template <int kDim, bool kHoldsQuery>
__device__ __forceinline__ void scores_of_codes(float (*s)[4], const uint32_t (&held)[kDim / 16][4],
                                                const uint16_t* query, const std::byte* keys,
                                                float scale) {
  constexpr int kStride = kCodeStride<kDim>;
  const int lane = threadIdx.x % 32;
  uint32_t factors[4];
  key_factors(scale, factors);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
  }
  // Dims 2t, 2t + 1 of the row of position g.
  const std::byte* from = keys + lane / 4 * kStride + lane % 4 * 2;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    if constexpr (kHoldsQuery) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[step][i];
    } else {
      load_matrices(
          a, query + (lane / 8 % 2 * 8 + lane % 8) * kStrideOf<kDim> + step * 16 + lane / 16 * 8);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto* codes = reinterpret_cast<const uint16_t*>(from + n * 8 * kStride + step * 16);
      multiply_add(s[n], a, widen_pair(codes[0], factors[n]), widen_pair(codes[4], factors[n]));
    }
  }
}

// weigh_values(): `left` has the even columns of [16 n, 16 n + 16) and `right` the odd ones.
// Transposed loads move codes in twos: columns 2g and 2g + 1 of rows 2t and 2t + 1.
template <int kDim>
__device__ __forceinline__ void weigh_codes(const uint32_t (&weights)[4][4],
                                            const std::byte* values,
                                            const uint32_t (&factors)[2][2][2], int n,
                                            float (&left)[4], float (&right)[4]) {
  const std::byte* from = values + threadIdx.x % 32 * kCodeStride<kDim> + n * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) left[i] = right[i] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[4];
    load_transposed(codes,
                    reinterpret_cast<const uint16_t*>(from + half * kHalf * kCodeStride<kDim>));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t (&of)[2] = factors[half][step];
      const uint32_t low = codes[2 * step];
      const uint32_t high = codes[2 * step + 1];
      multiply_add(left, weights[2 * half + step], widen_codes(low << 8, of[0]),
                   widen_codes(high << 8, of[1]));
      multiply_add(right, weights[2 * half + step], widen_codes(low, of[0]),
                   widen_codes(high, of[1]));
    }
  }
}

}  // namespace
}  // namespace llmserve::cuda
