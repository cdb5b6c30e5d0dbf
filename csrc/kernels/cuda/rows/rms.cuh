// The arithmetic of an RMS norm, in one place: what stands in a kernel of its own and what others
// do on the way has the same bits.
#pragma once

#include "kernels/cuda/fours.cuh"

namespace llmserve::cuda {

// What a row with this sum of squares is multiplied with.
__device__ __forceinline__ float rms_factor(float sum_of_squares, int64_t width,
                                            const NormNumbers& norm) {
  return norm_factor(sum_of_squares / static_cast<float>(width), norm);
}

__device__ __forceinline__ Four normed(const Four& x, float factor, const Four& weight,
                                       const NormNumbers& norm) {
  Four out;
#pragma unroll
  for (int j = 0; j < 4; ++j) out.at[j] = v_normed(x.at[j], factor, weight.at[j], norm);
  return out;
}

// Zeros change nothing: fours may reach beyond the row's end.
__device__ __forceinline__ float add_squares(const Four& x, float sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum = v_fma(x.at[j], x.at[j], sum);
  return sum;
}

// What one warp of the norm's block (rms_threads(width) threads, thread t with the fours t, t +
// threads, …) adds up; for every lane.
__device__ __forceinline__ float warp_squares(const float* x, int64_t width, int threads,
                                              int warp) {
  float sum = 0;
  for (int64_t i = 4 * (warp * 32 + threadIdx.x % 32); i < width; i += 4 * threads)
    sum = add_squares(load_four<false>(x, i, width), sum);
  return warp_sum(sum);
}

// The sum of what up to 32 warps have added up, lane i with warp i's; for every lane.
__device__ __forceinline__ float sum_of_warps(float mine, int num_warps) {
  return warp_sum(threadIdx.x % 32 < static_cast<unsigned>(num_warps) ? mine : 0.0f);
}

}  // namespace llmserve::cuda
