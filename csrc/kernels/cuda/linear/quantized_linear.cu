// Which kernel a weight of integers has.
#include "kernels/cuda/linear/quantized_linear.cuh"

namespace llmserve::cuda {
namespace {

QuantizedKernels kernels_of(const QuantizedLayout& layout) {
  if (layout.coding == Coding::kTable || layout.coding == Coding::kValues)
    return table_kernels(layout);
  if (layout.bits == 8) return byte_kernels(layout);
  if (layout.bits <= 3) return quarter_kernels(layout);
  return layout.bits == 4 ? nibble_kernels(layout) : middle_kernels(layout);
}

}  // namespace

bool has_quantized_kernel(const QuantizedLayout& layout) {
  return kernels_of(layout).run != nullptr;
}

void prepare_quantized_linear(const QuantizedLayout& layout) { kernels_of(layout).prepare(layout); }

void quantized_linear(const QuantizedParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  kernels_of(params.layout).run(params, stream);
}

}  // namespace llmserve::cuda
