// The rotation of a pair of a head's elements, for every kernel that does it: the same bits.
#pragma once

#include <cstdint>

namespace llmserve::cuda {

// Pair i of [0, half) of head x: (x_i, x_{i+half}) or, interleaved, (x_2i, x_2i+1). angles [2 *
// half]: the cosines, then the sines.
__device__ __forceinline__ void rotate_pair(float* x, const float* angles, int64_t i, int64_t half,
                                            bool interleaved) {
  float& a = interleaved ? x[2 * i] : x[i];
  float& b = interleaved ? x[2 * i + 1] : x[half + i];
  const float cosine = angles[i];
  const float sine = angles[half + i];
  const float rotated_a = a * cosine - b * sine;
  const float rotated_b = b * cosine + a * sine;
  a = rotated_a;
  b = rotated_b;
}

}  // namespace llmserve::cuda
