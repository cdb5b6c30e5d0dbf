#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels nibble_kernels(const QuantizedLayout& layout) {
  const GroupWidth width = layout.width;
  if (width == GroupWidth::kOne) return quantized_kernels<4, false, GroupWidth::kOne>();
  if (width == GroupWidth::kMany) return quantized_kernels<4, false, GroupWidth::kMany>();
  return {};
}

QuantizedKernels table_kernels(const QuantizedLayout& layout) {
  if (layout.width == GroupWidth::kOne) return quantized_kernels<4, true, GroupWidth::kOne>();
  return {};
}

}  // namespace llmserve::cuda
