#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels middle_kernels(const QuantizedLayout& layout) {
  if (layout.bits == 5)
    return find_kernels<5, Coding::kIntegers, GroupWidth::kHalf, GroupWidth::kOne>(layout);
  return find_kernels<6, Coding::kIntegers, GroupWidth::kHalf>(layout);
}

}  // namespace llmserve::cuda
