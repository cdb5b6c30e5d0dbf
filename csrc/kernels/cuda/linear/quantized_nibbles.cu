#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels nibble_kernels(const QuantizedLayout& layout) {
  return find_kernels<4, Coding::kIntegers, GroupWidth::kHalf, GroupWidth::kOne, GroupWidth::kMany>(
      layout);
}

}  // namespace llmserve::cuda
