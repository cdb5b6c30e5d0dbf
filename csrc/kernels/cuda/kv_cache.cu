#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

// blockIdx.x: token. Threads stride over e in [0, K * D): head e / D, element e % D. All offsets
// into the cache are int64: a pool has more than 2^31 elements soon.
template <Storage kStorage>
__global__ void store_cache_kernel(StoreParams p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / p.cache.block_size;
  const int64_t offset = slot % p.cache.block_size;
  for (int64_t e = threadIdx.x; e < p.cache.num_heads * p.cache.width; e += blockDim.x) {
    const int64_t head = e / p.cache.width;
    const int64_t i = e % p.cache.width;
    const int64_t to =
        ((block * p.cache.num_heads + head) * p.cache.block_size + offset) * p.cache.width + i;
    store<kStorage>(p.cache.data, to, p.from[token * p.token_stride + head * p.head_stride + i]);
  }
}

}  // namespace

void store_cache(const StoreParams& params, cudaStream_t stream) {
  const int64_t width = params.cache.num_heads * params.cache.width;
  if (params.num_tokens == 0 || width == 0) return;
  const auto kernel = params.storage == Storage::kF32 ? store_cache_kernel<Storage::kF32>
                                                      : store_cache_kernel<Storage::kBF16>;
  launch("store_kv", kernel, blocks(params.num_tokens), row_threads(width), 0, stream, params);
}

}  // namespace llmserve::cuda
