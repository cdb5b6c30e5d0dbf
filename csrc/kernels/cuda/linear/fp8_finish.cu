// What is left to do after a product of E4M3 that the library did not scale.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/quantized.h"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;

// blockIdx.x: part of the columns, blockIdx.y: rows, which it strides over.
__global__ void __launch_bounds__(kThreads) finish_kernel(Fp8FinishParams p) {
  wait_for_previous();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.out_features) return;
  const float weight_scale = p.weight_scales ? p.weight_scales[n] : 1.0f;
  const float bias = p.bias ? p.bias[n] : 0.0f;
  for (int64_t m = blockIdx.y; m < p.num_rows; m += gridDim.y) {
    float value = p.raw.data[m * p.raw.stride + n];
    if (p.x_scales) value = value * (p.x_scales[m] * weight_scale);
    if (p.bias) value = value + bias;
    float& out = p.out.data[m * p.out.stride + n];
    out = p.accumulate ? value + out : value;
  }
}

}  // namespace

void finish_fp8(const Fp8FinishParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  const auto across = static_cast<unsigned>(ceil_div(params.out_features, kThreads));
  const auto down = static_cast<unsigned>(std::min(params.num_rows, kMaxGridYZ));
  launch_early("linear", finish_kernel, dim3(across, down), kThreads, 0, stream, params);
}

}  // namespace llmserve::cuda
