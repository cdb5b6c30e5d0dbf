#include "kernels/cuda/attention/cache_rows.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

// blockIdx.x: token. A warp a head, the first ones to begin with.
template <Storage kStorage>
__global__ void store_cache_kernel(StoreParams p) {
  const int64_t token = blockIdx.x;
  for (int64_t head = threadIdx.x / 32; head < p.cache.num_heads; head += blockDim.x / 32)
    store_row<kStorage>(p.cache, p.slots[token], head,
                        p.from + token * p.token_stride + head * p.head_stride);
}

}  // namespace

void store_cache(const StoreParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return;
  const auto kernel = params.storage == Storage::kF32    ? store_cache_kernel<Storage::kF32>
                      : params.storage == Storage::kBF16 ? store_cache_kernel<Storage::kBF16>
                                                         : store_cache_kernel<Storage::kF8>;
  launch("store_kv", kernel, blocks(params.num_tokens),
         row_threads(params.cache.num_heads * kWarpSize), 0, stream, params);
}

}  // namespace llmserve::cuda
