// Heads of usual widths held in registers: their norm, their rotation, and their way to the cache.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/cache_rows.cuh"
#include "kernels/cuda/rows/rms.cuh"

namespace llmserve::cuda {
namespace {

// How the heads of one width lie in a warp: each in kLanes lanes, lane l of them with its fours l,
// l + kLanes, …, kFours of them. A lane has kHeads heads, whose loads are on their way together.
template <int kLanes_, int kFours_, int kHeads_>
struct Held {
  static constexpr int kLanes = kLanes_;
  static constexpr int kFours = kFours_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kSide = 32 / kLanes;          // heads side by side
  static constexpr int kWarpHeads = kHeads * kSide;  // of one kind, that a warp takes
};

struct Angles {
  Four cosines;
  Four sines;       // those of elements that come first in their pair, negated
  bool is_rotated;  // whether the four is within the rotated width
};

// Of the four `index` of a head. x * cosine + other * sine is what rotate_pair does: -(b * sine) =
// b * -sine.
__device__ __forceinline__ Angles angles_of(const float* angles, int index, int half,
                                            bool interleaved) {
  Angles a{};
  a.is_rotated = 4 * index < 2 * half;
  if (!a.is_rotated) return a;
  if (interleaved) {
    const float2 c = *reinterpret_cast<const float2*>(angles + 2 * index);
    const float2 s = *reinterpret_cast<const float2*>(angles + half + 2 * index);
    a.cosines = {{c.x, c.x, c.y, c.y}};
    a.sines = {{-s.x, s.x, -s.y, s.y}};
    return a;
  }
  const bool is_first = 4 * index < half;
  const int i = 4 * index - (is_first ? 0 : half);
  a.cosines = load_four<true>(angles, i, half);
  a.sines = load_four<true>(angles + half, i, half);
#pragma unroll
  for (int j = 0; j < 4; ++j) a.sines.at[j] = is_first ? -a.sines.at[j] : a.sines.at[j];
  return a;
}

__device__ __forceinline__ void rotate(Four& x, const Four& other, const Angles& a) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float rotated = x.at[j] * a.cosines.at[j] + other.at[j] * a.sines.at[j];
    x.at[j] = a.is_rotated ? rotated : x.at[j];
  }
}

// The other elements of a head's pairs: neighbours, or those `half` away, which another lane has,
// or, if they are kLanes fours away, the lane itself.
template <class Shape>
__device__ __forceinline__ void turn_head(Four (&x)[Shape::kFours],
                                          const Angles (&angles)[Shape::kFours], int half,
                                          bool interleaved) {
  constexpr int kLanes = Shape::kLanes;
  if (interleaved) {
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) {
      const Four& v = x[f];
      rotate(x[f], {{v.at[1], v.at[0], v.at[3], v.at[2]}}, angles[f]);
    }
    return;
  }
  if constexpr (Shape::kFours == 2) {
    if (half == 4 * kLanes) {
      const Four first = x[0];
      rotate(x[0], x[1], angles[0]);
      rotate(x[1], first, angles[1]);
      return;
    }
  }
  const int lane = threadIdx.x % kLanes;
  const int away = half / 4;
  const int partner = threadIdx.x % 32 - lane +
                      (lane < away       ? lane + away
                       : lane < 2 * away ? lane - away
                                         : lane);
  Four other;
#pragma unroll
  for (int j = 0; j < 4; ++j) other.at[j] = __shfl_sync(kAllLanes, x[0].at[j], partner);
  rotate(x[0], other, angles[0]);
}

// Over the lanes of a head: a warp of the norm's own block adds zeros beside them.
template <int kLanes>
__device__ __forceinline__ float head_sum(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// A head's fours as codes, a word each, by one scale: those of store_row.
template <class Shape>
struct Codes {
  uint32_t words[Shape::kFours];
  float scale;
};
template <class Shape>
__device__ __forceinline__ Codes<Shape> encode_head(const Four (&x)[Shape::kFours]) {
  int32_t largest = 0;
#pragma unroll
  for (int f = 0; f < Shape::kFours; ++f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t magnitude = v_bits(x[f].at[j]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  for (int distance = Shape::kLanes / 2; distance > 0; distance /= 2) {
    const int32_t other = __shfl_xor_sync(kAllLanes, largest, distance);
    largest = other > largest ? other : largest;
  }
  Codes<Shape> codes{};
  codes.scale = v_fp8_scale(largest);
  const bool is_finite = largest < 0x7f800000;
  const float inverse = 1.0f / codes.scale;  // exact: a power of two
#pragma unroll
  for (int f = 0; f < Shape::kFours; ++f) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto code = static_cast<uint8_t>(v_to_fp8(x[f].at[j] * inverse));
      word |= uint32_t{code} << 8 * j;
    }
    codes.words[f] = is_finite ? word : 0;
  }
  return codes;
}

// As store_row does it: the heads' fours to their row of a slot.
template <Storage kStorage, class Shape>
__device__ __forceinline__ void store_head(const CachePart& part, int64_t block, int64_t offset,
                                           int64_t head, const Four (&x)[Shape::kFours],
                                           bool is_mine) {
  const int lane = threadIdx.x % Shape::kLanes;
  const int64_t to = head_offset(part, block, head) + offset * part.row_stride;
  if constexpr (kStorage == Storage::kF8) {
    const Codes<Shape> codes = encode_head<Shape>(x);
    if (!is_mine) return;
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) {
      const int i = 4 * (lane + f * Shape::kLanes);
      if (i < part.width)
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(part.data) + to + i) = codes.words[f];
    }
    if (lane == 0) head_scales(part, block, head)[offset] = codes.scale;
  } else {
    using Element = std::conditional_t<kStorage == Storage::kF32, float, uint16_t>;
    if (!is_mine) return;
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f)
      store_four<true>(static_cast<Element*>(part.data) + to, 4 * (lane + f * Shape::kLanes),
                       part.width, x[f]);
  }
}

// The norm and the rotation of one head a kLanes lanes, where there are weights and angles, from
// and to registers.
template <class Shape>
__device__ __forceinline__ void prepare_head(const QkvParams& p, const float* weights,
                                             const float* angle_row, Four (&x)[Shape::kFours]) {
  const int lane = threadIdx.x % Shape::kLanes;
  const auto width = static_cast<int>(p.keys.width);
  const auto half = static_cast<int>(p.half);
  Four weight[Shape::kFours] = {};
  Angles angles[Shape::kFours] = {};
#pragma unroll
  for (int f = 0; f < Shape::kFours; ++f) {
    const int index = lane + f * Shape::kLanes;
    if (weights) weight[f] = load_four<true>(weights, 4 * index, width);
    if (angle_row) angles[f] = angles_of(angle_row, index, half, p.interleaved);
  }
  if (weights) {
    float sum = 0;
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) sum += head_sum<Shape::kLanes>(add_squares(x[f], 0.0f));
    const float factor = rms_factor(sum, width, p.norm);
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) x[f] = normed(x[f], factor, weight[f], p.norm);
  }
  if (angle_row) turn_head<Shape>(x, angles, half, p.interleaved);
}

}  // namespace
}  // namespace llmserve::cuda
