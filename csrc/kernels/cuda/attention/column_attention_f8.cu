#include "kernels/cuda/attention/column_attention.cuh"

namespace llmserve::cuda {

ColumnKernels column_kernels_f8(bool is_narrow) {
  return column_kernels_of<Storage::kF8>(is_narrow);
}

}  // namespace llmserve::cuda
