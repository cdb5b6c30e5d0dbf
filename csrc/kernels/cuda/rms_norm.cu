#include "kernels/cuda/rms.cuh"

namespace llmserve::cuda {
namespace {

// blockIdx.x: row, in [0, R). Thread i owns the elements i, i + blockDim.x, … of its row in both
// passes, so that out may be x and the residual may be written before it is read again.
template <bool kAddsResidual, bool kRounds>
__global__ void rms_norm_kernel(NormParams p) {
  const int64_t token = blockIdx.x / p.num_heads;
  const int64_t head = blockIdx.x % p.num_heads;
  const float* x = p.x.data + token * p.x.stride + head * p.x_head_stride;
  float* residual = p.residual.data + token * p.residual.stride;
  float* out = p.out.data + token * p.out.stride + head * p.out_head_stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    float value = x[i];
    if constexpr (kAddsResidual) {
      value += residual[i];
      residual[i] = value;
    }
    sum = v_fma(value, value, sum);
  }
  const float inverse = inverse_rms(block_sum(sum), p.width, p.eps);
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    const float value =
        normed(kAddsResidual ? residual[i] : x[i], inverse, p.weight[i], p.weight_offset);
    if constexpr (kRounds)
      p.rounded[blockIdx.x * p.width + i] = float_to_bf16(value);
    else
      out[i] = value;
  }
}

}  // namespace

void rms_norm(const NormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.width == 0) return;
  const auto kernel = params.rounded         ? rms_norm_kernel<false, true>
                      : params.residual.data ? rms_norm_kernel<true, false>
                                             : rms_norm_kernel<false, false>;
  launch("rms_norm", kernel, blocks(params.num_rows), rms_threads(params.width), 0, stream, params);
}

}  // namespace llmserve::cuda
