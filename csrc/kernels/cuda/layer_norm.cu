#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

// blockIdx.x: row, in [0, R). Thread i owns the elements i, i + blockDim.x, … of its row in every
// pass, so that out may be x.
__global__ void layer_norm_kernel(LayerNormParams p) {
  const float* x = p.x.data + static_cast<int64_t>(blockIdx.x) * p.x.stride;
  float* out = p.out.data + static_cast<int64_t>(blockIdx.x) * p.out.stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) sum += x[i];
  const float mean = block_sum(sum) / static_cast<float>(p.width);
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    const float deviation = x[i] - mean;
    squares = v_fma(deviation, deviation, squares);
  }
  const float variance = block_sum(squares) / static_cast<float>(p.width);
  const float inverse = 1.0f / sqrtf(variance + p.eps);
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    const float normed = (x[i] - mean) * inverse * p.weight[i];
    out[i] = p.bias ? normed + p.bias[i] : normed;
  }
}

}  // namespace

void layer_norm(const LayerNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.width == 0) return;
  launch("layer_norm", layer_norm_kernel, blocks(params.num_rows),
         row_threads(params.width, kMaxThreads), 0, stream, params);
}

}  // namespace llmserve::cuda
