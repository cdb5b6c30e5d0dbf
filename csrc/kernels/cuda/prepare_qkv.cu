// What stands between the product of queries, keys and values and attention: norms of heads,
// rotation, the writing of the cache. The arithmetic of rms_norm.cu, elementwise.cu (rotary) and
// kv_cache.cu, element by element, and so their bits.
#include "kernels/cuda/cache_rows.cuh"
#include "kernels/cuda/rms.cuh"
#include "kernels/cuda/rotate.cuh"

namespace llmserve::cuda {
namespace {

// The sum of squares of a head in shared memory, as a block of one thread an element has it; the
// whole warp's.
__device__ float head_squares(const float* x, int64_t width, int threads) {
  const int num_warps = threads / 32;
  float mine = 0;
  for (int warp = 0; warp < num_warps; ++warp) {
    const float sum = warp_squares(x, width, threads, warp);
    if (static_cast<int>(threadIdx.x % 32) == warp) mine = sum;
  }
  return sum_of_warps(mine, num_warps);
}

// Norm and rotation of the head in shared memory, in place; lane l has the elements and the pairs
// l, l + 32, ….
__device__ void norm_and_turn(const QkvParams& p, float* x, const float* weight,
                              const float* angles) {
  const int lane = threadIdx.x % 32;
  const int64_t width = p.keys.width;
  if (weight) {
    const float inverse = inverse_rms(head_squares(x, width, p.norm_threads), width, p.eps);
    for (int64_t i = lane; i < width; i += 32)
      x[i] = normed(x[i], inverse, weight[i], p.weight_offset);
    __syncwarp();
  }
  if (angles == nullptr) return;
  for (int64_t i = lane; i < p.half; i += 32) rotate_pair(x, angles, i, p.half, p.interleaved);
  __syncwarp();
}

// blockIdx.x = token * token_blocks + i. Warp w of the block has head i * kQkvWarps + w of the
// token's queries, keys and values, in this order.
template <Storage kStorage>
__global__ void __launch_bounds__(kQkvWarps * 32) prepare_qkv_kernel(QkvParams p) {
  LLMSERVE_DYNAMIC_SHARED(float, heads);  // [kQkvWarps, D]
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t kv_heads = p.keys.num_heads;
  const int64_t token = blockIdx.x / p.token_blocks;
  const int64_t head = blockIdx.x % p.token_blocks * kQkvWarps + warp;
  const int64_t kv_head = (head - p.num_heads) % kv_heads;
  const int64_t slot = p.slots[token];
  if (head >= p.num_heads + kv_heads) {
    if (head >= p.num_heads + 2 * kv_heads) return;
    const float* v = p.v.data + token * p.v.stride + kv_head * p.values.width;
    store_row<kStorage>(p.values, slot, kv_head, v);
    return;
  }
  const int64_t width = p.keys.width;
  const bool is_query = head < p.num_heads;
  float* x = heads + warp * width;
  const float* from = is_query ? p.q.data + token * p.q.stride + head * width
                               : p.k.data + token * p.k.stride + kv_head * width;
  for (int64_t i = lane; i < width; i += 32) x[i] = from[i];
  __syncwarp();
  const ConstRows angles = is_query ? p.q_cos_sin : p.k_cos_sin;
  norm_and_turn(p, x, is_query ? p.q_norm : p.k_norm,
                angles.data ? angles.data + token * angles.stride : nullptr);
  if (!is_query) {
    store_row<kStorage>(p.keys, slot, kv_head, x);
    return;
  }
  float* to = p.q.data + token * p.q.stride + head * width;
  for (int64_t i = lane; i < width; i += 32) to[i] = x[i];
}

}  // namespace

void prepare_qkv(const QkvParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const auto kernel = p.storage == Storage::kF32    ? prepare_qkv_kernel<Storage::kF32>
                      : p.storage == Storage::kBF16 ? prepare_qkv_kernel<Storage::kBF16>
                                                    : prepare_qkv_kernel<Storage::kF8>;
  launch("prepare_qkv", kernel, blocks(p.num_tokens * p.token_blocks), kQkvWarps * 32,
         static_cast<size_t>(qkv_shared_bytes(p.keys.width)), stream, p);
}

}  // namespace llmserve::cuda
