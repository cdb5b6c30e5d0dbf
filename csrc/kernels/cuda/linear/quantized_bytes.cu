#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels byte_kernels(const QuantizedLayout& layout) {
  if (layout.coding == Coding::kFp8)
    return find_kernels<8, Coding::kFp8, GroupWidth::kMany>(layout);
  return find_kernels<8, Coding::kIntegers, GroupWidth::kHalf, GroupWidth::kOne, GroupWidth::kMany>(
      layout);
}

}  // namespace llmserve::cuda
