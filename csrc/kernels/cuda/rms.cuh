// The arithmetic of an RMS norm, in one place: what stands in a kernel of its own and what others
// do on the way has the same bits.
#pragma once

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {

// 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int64_t width, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(width) + eps);
}

__device__ __forceinline__ float normed(float x, float inverse, float weight, float offset) {
  return x * inverse * (weight + offset);
}

// What one warp of the norm's block (rms_threads(width) threads, thread i with the elements i, i +
// threads, ...) adds up; for every lane.
__device__ __forceinline__ float warp_squares(const float* x, int64_t width, int threads,
                                              int warp) {
  float sum = 0;
  for (int64_t i = warp * 32 + threadIdx.x % 32; i < width; i += threads)
    sum = v_fma(x[i], x[i], sum);
  return warp_sum(sum);
}

// The sum of what up to 32 warps have added up, lane i with warp i's; for every lane.
__device__ __forceinline__ float sum_of_warps(float mine, int num_warps) {
  return warp_sum(threadIdx.x % 32 < static_cast<unsigned>(num_warps) ? mine : 0.0f);
}

}  // namespace llmserve::cuda
