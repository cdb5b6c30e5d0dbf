#include "kernels/cuda/attention/column_attention.cuh"

namespace llmserve::cuda {

ColumnKernels column_kernels_bf16(bool is_narrow) {
  return column_kernels_of<Storage::kBF16>(is_narrow);
}

}  // namespace llmserve::cuda
