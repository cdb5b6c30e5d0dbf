#include "kernels/cuda/rows/rms.cuh"

namespace llmserve::cuda {
namespace {

// The sum over the norm's block, for every thread. Once a kernel: nobody writes again what is read.
__device__ __forceinline__ float sum_of_block(float mine) {
  __shared__ float partial[32];
  const float sum = warp_sum(mine);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  return sum_of_warps(partial[threadIdx.x % 32], blockDim.x / 32);
}

// blockIdx.x: row, in [0, R).
struct NormRow {
  const float* x;
  float* residual;
  float* out;
  uint16_t* rounded;

  __device__ __forceinline__ explicit NormRow(const NormParams& p) {
    const auto num_heads = static_cast<unsigned>(p.num_heads);
    const int64_t token = blockIdx.x / num_heads;
    const int64_t head = blockIdx.x % num_heads;
    x = p.x.data + token * p.x.stride + head * p.x_head_stride;
    residual = p.residual.data + token * p.residual.stride;
    out = p.out.data + token * p.out.stride + head * p.out_head_stride;
    rounded = p.rounded + static_cast<int64_t>(blockIdx.x) * p.width;
  }

  template <bool kIsAligned, bool kRounds>
  __device__ __forceinline__ void write(int64_t i, int64_t width, const Four& four) const {
    if constexpr (kRounds)
      store_four<kIsAligned>(rounded, i, width, four);
    else
      store_four<kIsAligned>(out, i, width, four);
  }
};

__device__ __forceinline__ Four sum_of(const Four& a, const Four& b) {
  Four sum;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum.at[j] = a.at[j] + b.at[j];
  return sum;
}

// Thread t holds the fours t, t + blockDim.x, … of an aligned row, kHeld of them, and their
// weights: all are asked for at once.
template <int kHeld, bool kAddsResidual, bool kRounds>
__global__ void __launch_bounds__(kFourThreads) rms_norm_held_kernel(NormParams p) {
  wait_for_previous();
  const NormRow row(p);
  const int64_t begin = 4 * threadIdx.x;
  const int64_t step = 4 * blockDim.x;
  Four x[kHeld];
  Four before[kHeld];
  Four weight[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    x[h] = load_four<true>(row.x, begin + h * step, p.width);
    if constexpr (kAddsResidual)
      before[h] = load_four<true>(row.residual, begin + h * step, p.width);
    weight[h] = load_four<true>(p.weight, begin + h * step, p.width);
  }
  float sum = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    if constexpr (kAddsResidual) {
      x[h] = sum_of(x[h], before[h]);
      store_four<true>(row.residual, begin + h * step, p.width, x[h]);
    }
    sum = add_squares(x[h], sum);
  }
  const float factor = rms_factor(sum_of_block(sum), p.width, p.numbers);
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    row.write<true, kRounds>(begin + h * step, p.width, normed(x[h], factor, weight[h], p.numbers));
}

// Rows that are too wide for that, or not aligned. The thread that reads an element writes it, so
// that out may be x and the residual may be written before it is read again.
template <bool kIsAligned, bool kAddsResidual, bool kRounds>
__global__ void __launch_bounds__(kFourThreads) rms_norm_kernel(NormParams p) {
  wait_for_previous();
  const NormRow row(p);
  const int64_t begin = 4 * threadIdx.x;
  const int64_t step = 4 * blockDim.x;
  float sum = 0;
  for (int64_t i = begin; i < p.width; i += step) {
    Four x = load_four<kIsAligned>(row.x, i, p.width);
    if constexpr (kAddsResidual) {
      x = sum_of(x, load_four<kIsAligned>(row.residual, i, p.width));
      store_four<kIsAligned>(row.residual, i, p.width, x);
    }
    sum = add_squares(x, sum);
  }
  const float factor = rms_factor(sum_of_block(sum), p.width, p.numbers);
  for (int64_t i = begin; i < p.width; i += step) {
    const Four x = load_four<kIsAligned>(kAddsResidual ? row.residual : row.x, i, p.width);
    const Four weight = load_four<kIsAligned>(p.weight, i, p.width);
    row.write<kIsAligned, kRounds>(i, p.width, normed(x, factor, weight, p.numbers));
  }
}

bool has_whole_fours(const NormParams& p) {
  const bool has_heads = p.num_heads > 1;  // if not, their strides say nothing
  return p.width % 4 == 0 && is_aligned(p.x) && is_aligned(p.residual) && is_aligned(p.out) &&
         is_aligned(p.weight, has_heads ? p.x_head_stride : 0) &&
         is_aligned(p.rounded, has_heads ? p.out_head_stride : 0);
}

template <bool kAddsResidual, bool kRounds>
auto kernel_of(const NormParams& p) {
  if (!has_whole_fours(p)) return rms_norm_kernel<false, kAddsResidual, kRounds>;
  switch (held_fours(p.width)) {
    case 1:
      return rms_norm_held_kernel<1, kAddsResidual, kRounds>;
    case 2:
      return rms_norm_held_kernel<2, kAddsResidual, kRounds>;
    case 4:
      return rms_norm_held_kernel<4, kAddsResidual, kRounds>;
    case 8:
      return rms_norm_held_kernel<8, kAddsResidual, kRounds>;
    default:
      return rms_norm_kernel<true, kAddsResidual, kRounds>;
  }
}

}  // namespace

void rms_norm(const NormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.width == 0) return;
  const auto kernel = params.rounded         ? kernel_of<false, true>(params)
                      : params.residual.data ? kernel_of<true, false>(params)
                                             : kernel_of<false, false>(params);
  launch_early("rms_norm", kernel, blocks(params.num_rows), rms_threads(params.width), 0, stream,
               params);
}

}  // namespace llmserve::cuda
