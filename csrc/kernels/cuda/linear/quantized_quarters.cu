#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels quarter_kernels(const QuantizedLayout& layout) {
  const GroupWidth width = layout.width;
  if (layout.bits == 2 && width == GroupWidth::kHalf)
    return quantized_kernels<2, false, GroupWidth::kHalf>();
  if (layout.bits == 2 && width == GroupWidth::kMany)
    return quantized_kernels<2, false, GroupWidth::kMany>();
  if (layout.bits == 3 && width == GroupWidth::kHalf)
    return quantized_kernels<3, false, GroupWidth::kHalf>();
  return {};
}

}  // namespace llmserve::cuda
