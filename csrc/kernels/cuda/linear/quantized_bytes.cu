#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels byte_kernels(const QuantizedLayout& layout) {
  const GroupWidth width = layout.width;
  if (layout.bits == 5 && width == GroupWidth::kOne)
    return quantized_kernels<5, false, GroupWidth::kOne>();
  if (layout.bits == 6 && width == GroupWidth::kHalf)
    return quantized_kernels<6, false, GroupWidth::kHalf>();
  if (layout.bits == 8 && width == GroupWidth::kOne)
    return quantized_kernels<8, false, GroupWidth::kOne>();
  if (layout.bits == 8 && width == GroupWidth::kMany)
    return quantized_kernels<8, false, GroupWidth::kMany>();
  return {};
}

}  // namespace llmserve::cuda
