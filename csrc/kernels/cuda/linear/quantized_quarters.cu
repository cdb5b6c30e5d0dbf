#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels quarter_kernels(const QuantizedLayout& layout) {
  if (layout.bits == 2)
    return find_kernels<2, Coding::kIntegers, GroupWidth::kHalf, GroupWidth::kMany>(layout);
  return find_kernels<3, Coding::kIntegers, GroupWidth::kHalf, GroupWidth::kMany>(layout);
}

}  // namespace llmserve::cuda
