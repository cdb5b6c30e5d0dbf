#include "kernels/cuda/attention/tiled_attention.cuh"

namespace llmserve::cuda {

TiledKernels tiled_kernels_f8(int64_t width) { return tiled_kernels_of<Storage::kF8>(width); }

}  // namespace llmserve::cuda
