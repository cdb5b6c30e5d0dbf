#include "kernels/cuda/fours.cuh"

namespace llmserve::cuda {
namespace {

__device__ __forceinline__ float add_elements(const Four& x, float sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += x.at[j];
  return sum;
}

// Those of elements beyond the row's end do not count.
__device__ __forceinline__ float add_squared_deviations(const Four& x, int64_t i, int64_t width,
                                                        float mean, float sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float deviation = i + j < width ? x.at[j] - mean : 0.0f;
    sum = v_fma(deviation, deviation, sum);
  }
  return sum;
}

__device__ __forceinline__ Four normed(const LayerNormParams& p, const Four& x, float mean,
                                       float factor, const Four& weight, const Four& bias) {
  Four out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    out.at[j] = v_normed(x.at[j] - mean, factor, weight.at[j], p.numbers);
    if (p.bias) out.at[j] += bias.at[j];
  }
  return out;
}

__device__ __forceinline__ float factor_of(const LayerNormParams& p, float squares) {
  return norm_factor(squares / static_cast<float>(p.width), p.numbers);
}

// blockIdx.x: row, in [0, R). Thread t holds the fours t, t + blockDim.x, … of an aligned row,
// kHeld of them, with their weights and biases: all are asked for at once.
template <int kHeld>
__global__ void __launch_bounds__(kFourThreads) layer_norm_held_kernel(LayerNormParams p) {
  wait_for_previous();
  const float* from = p.x.data + static_cast<int64_t>(blockIdx.x) * p.x.stride;
  float* out = p.out.data + static_cast<int64_t>(blockIdx.x) * p.out.stride;
  const int64_t begin = 4 * threadIdx.x;
  const int64_t step = 4 * blockDim.x;
  Four x[kHeld];
  Four weight[kHeld];
  Four bias[kHeld] = {};
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    x[h] = load_four<true>(from, begin + h * step, p.width);
    weight[h] = load_four<true>(p.weight, begin + h * step, p.width);
    if (p.bias) bias[h] = load_four<true>(p.bias, begin + h * step, p.width);
  }
  float sum = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) sum = add_elements(x[h], sum);
  const float mean = block_sum(sum) / static_cast<float>(p.width);
  float squares = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    squares = add_squared_deviations(x[h], begin + h * step, p.width, mean, squares);
  const float factor = factor_of(p, block_sum(squares));
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    store_four<true>(out, begin + h * step, p.width,
                     normed(p, x[h], mean, factor, weight[h], bias[h]));
}

// Rows that are too wide for that, or not aligned, in the same order. The thread that reads an
// element writes it, so that out may be x.
template <bool kIsAligned>
__global__ void __launch_bounds__(kFourThreads) layer_norm_kernel(LayerNormParams p) {
  wait_for_previous();
  const float* from = p.x.data + static_cast<int64_t>(blockIdx.x) * p.x.stride;
  float* out = p.out.data + static_cast<int64_t>(blockIdx.x) * p.out.stride;
  const int64_t begin = 4 * threadIdx.x;
  const int64_t step = 4 * blockDim.x;
  float sum = 0;
  for (int64_t i = begin; i < p.width; i += step)
    sum = add_elements(load_four<kIsAligned>(from, i, p.width), sum);
  const float mean = block_sum(sum) / static_cast<float>(p.width);
  float squares = 0;
  for (int64_t i = begin; i < p.width; i += step)
    squares =
        add_squared_deviations(load_four<kIsAligned>(from, i, p.width), i, p.width, mean, squares);
  const float factor = factor_of(p, block_sum(squares));
  for (int64_t i = begin; i < p.width; i += step) {
    const Four x = load_four<kIsAligned>(from, i, p.width);
    const Four weight = load_four<kIsAligned>(p.weight, i, p.width);
    const Four bias = p.bias ? load_four<kIsAligned>(p.bias, i, p.width) : Four{};
    store_four<kIsAligned>(out, i, p.width, normed(p, x, mean, factor, weight, bias));
  }
}

auto kernel_of(const LayerNormParams& p) {
  if (p.width % 4 != 0 || !is_aligned(p.x) || !is_aligned(p.out) || !is_aligned(p.weight, 0) ||
      !is_aligned(p.bias, 0))
    return layer_norm_kernel<false>;
  switch (held_fours(p.width)) {
    case 1:
      return layer_norm_held_kernel<1>;
    case 2:
      return layer_norm_held_kernel<2>;
    case 4:
      return layer_norm_held_kernel<4>;
    case 8:
      return layer_norm_held_kernel<8>;
    default:
      return layer_norm_kernel<true>;
  }
}

}  // namespace

void layer_norm(const LayerNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.width == 0) return;
  launch_early("layer_norm", kernel_of(params), blocks(params.num_rows), four_threads(params.width),
               0, stream, params);
}

}  // namespace llmserve::cuda
