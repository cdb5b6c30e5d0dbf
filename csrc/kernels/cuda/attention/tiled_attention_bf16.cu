#include "kernels/cuda/attention/tiled_attention.cuh"

namespace llmserve::cuda {

TiledKernels tiled_kernels_bf16(int64_t width) { return tiled_kernels_of<Storage::kBF16>(width); }

}  // namespace llmserve::cuda
