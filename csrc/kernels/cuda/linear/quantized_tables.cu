#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {

QuantizedKernels table_kernels(const QuantizedLayout& layout) {
  if (layout.coding == Coding::kValues)
    return find_kernels<4, Coding::kValues, GroupWidth::kMany>(layout);
  return find_kernels<4, Coding::kTable, GroupWidth::kHalf, GroupWidth::kOne>(layout);
}

}  // namespace llmserve::cuda
