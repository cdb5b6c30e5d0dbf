// What stands between the product of queries, keys and values and attention: norms of heads,
// rotation, the writing of the cache. The arithmetic of rms_norm.cu, elementwise.cu (rotary) and
// kv_cache.cu, element by element, and so their bits. Heads of usual widths are held in registers
// (prepare_held_kernel), others in shared memory.
#include "kernels/cuda/attention/held_heads.cuh"
#include "kernels/cuda/rows/rotate.cuh"

namespace llmserve::cuda {
namespace {

// A block's at most, in prepare_held_kernel: 32 heads of 128, the usual token's.
constexpr int kHeldWarps = 8;
// Up to so many heads of all tokens, a warp takes no more than its lanes hold at once, which is
// soonest done: 16 warps for each SM of a large GPU (132 of them). More heads a warp read weights
// and angles less often.
constexpr int64_t kFewHeads = 16 * 132;

// The sum of squares of a head in shared memory, as the norm's own block of so many threads has it;
// the whole warp's.
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
    const float factor = rms_factor(head_squares(x, width, p.norm_threads), width, p.norm);
    for (int64_t i = lane; i < width; i += 32) x[i] = v_normed(x[i], factor, weight[i], p.norm);
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
  wait_for_previous();
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

// blockIdx.x: token. Warp blockIdx.y * (blockDim.x / 32) + w has kWarpHeads heads of the token's
// queries, or of its keys, or of its values, in this order; the last warp of a kind maybe fewer.
template <class Shape, Storage kStorage>
__global__ void __launch_bounds__(kHeldWarps * 32) prepare_held_kernel(QkvParams p) {
  wait_for_previous();
  constexpr int kFours = Shape::kFours;
  constexpr int kHeads = Shape::kHeads;
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % Shape::kLanes;
  const auto num_heads = static_cast<int>(p.num_heads);
  const auto kv_heads = static_cast<int>(p.keys.num_heads);
  const auto width = static_cast<int>(p.keys.width);
  const auto half = static_cast<int>(p.half);
  const int query_warps = (num_heads + Shape::kWarpHeads - 1) / Shape::kWarpHeads;
  const int kv_warps = (kv_heads + Shape::kWarpHeads - 1) / Shape::kWarpHeads;
  int warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
  if (warp >= query_warps + 2 * kv_warps) return;
  const bool is_query = warp < query_warps;
  if (!is_query) warp -= query_warps;
  const bool is_value = !is_query && warp >= kv_warps;
  if (is_value) warp -= kv_warps;
  const int count = is_query ? num_heads : kv_heads;
  const int first = warp * Shape::kWarpHeads + threadIdx.x % 32 / Shape::kLanes;
  const float* from = is_query   ? p.q.data + token * p.q.stride
                      : is_value ? p.v.data + token * p.v.stride
                                 : p.k.data + token * p.k.stride;
  const float* weights = is_query ? p.q_norm : is_value ? nullptr : p.k_norm;
  const ConstRows table = is_query ? p.q_cos_sin : p.k_cos_sin;
  const float* row = is_value || !table.data ? nullptr : table.data + token * table.stride;

  const int64_t slot = is_query ? 0 : p.slots[token];
  Four x[kHeads][kFours] = {};
  Four weight[kFours] = {};
  Angles angles[kFours] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = first + h * Shape::kSide;
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      if (head < count)
        x[h][f] = load_four<true>(from + head * width, 4 * (lane + f * Shape::kLanes), width);
    }
  }
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const int index = lane + f * Shape::kLanes;
    if (weights) weight[f] = load_four<true>(weights, 4 * index, width);
    if (row) angles[f] = angles_of(row, index, half, p.interleaved);
  }
  if (weights) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0;
#pragma unroll
      for (int f = 0; f < kFours; ++f) sum += head_sum<Shape::kLanes>(add_squares(x[h][f], 0.0f));
      const float factor = rms_factor(sum, width, p.norm);
#pragma unroll
      for (int f = 0; f < kFours; ++f) x[h][f] = normed(x[h][f], factor, weight[f], p.norm);
    }
  }
  if (row) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) turn_head<Shape>(x[h], angles, half, p.interleaved);
  }
  if (is_query) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = first + h * Shape::kSide;
      float* to = p.q.data + token * p.q.stride + head * width;
#pragma unroll
      for (int f = 0; f < kFours; ++f)
        if (head < count) store_four<true>(to, 4 * (lane + f * Shape::kLanes), width, x[h][f]);
    }
    return;
  }
  if (slot < 0) return;
  const CachePart& part = is_value ? p.values : p.keys;
  const int64_t block = slot / part.block_size;
  const int64_t offset = slot % part.block_size;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = first + h * Shape::kSide;
    store_head<kStorage, Shape>(part, block, offset, head, x[h], head < count);
  }
}

template <class Shape>
void launch_held(const QkvParams& p, cudaStream_t stream) {
  const int64_t warps =
      ceil_div(p.num_heads, Shape::kWarpHeads) + 2 * ceil_div(p.keys.num_heads, Shape::kWarpHeads);
  const int64_t parts = ceil_div(warps, kHeldWarps);  // of a token, alike in size
  const auto kernel = p.storage == Storage::kF32    ? prepare_held_kernel<Shape, Storage::kF32>
                      : p.storage == Storage::kBF16 ? prepare_held_kernel<Shape, Storage::kBF16>
                                                    : prepare_held_kernel<Shape, Storage::kF8>;
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(parts));
  launch_early("prepare_qkv", kernel, grid, static_cast<int>(32 * ceil_div(warps, parts)), 0,
               stream, p);
}

// By width: half a warp holds up to 64 elements in fours, a warp 128 or, twice, 256.
void launch_held(const QkvParams& p, cudaStream_t stream) {
  const bool are_few = p.num_tokens * (p.num_heads + 2 * p.keys.num_heads) <= kFewHeads;
  if (p.keys.width <= 64)
    are_few ? launch_held<Held<16, 1, 1>>(p, stream) : launch_held<Held<16, 1, 2>>(p, stream);
  else if (p.keys.width <= 128)
    are_few ? launch_held<Held<32, 1, 1>>(p, stream) : launch_held<Held<32, 1, 4>>(p, stream);
  else
    are_few ? launch_held<Held<32, 2, 1>>(p, stream) : launch_held<Held<32, 2, 2>>(p, stream);
}

}  // namespace

bool can_hold_heads(const QkvParams& p) {
  const int64_t width = p.keys.width;
  const bool has_pairs = width <= 128 || p.interleaved || p.half <= 64 || p.half == 128;
  return width % 4 == 0 && width <= 256 && p.values.width == width && p.half % 4 == 0 &&
         has_pairs && is_aligned(p.q) && is_aligned(p.k) && is_aligned(p.v) &&
         is_aligned(p.q_norm, 0) && is_aligned(p.k_norm, 0) && is_aligned(p.q_cos_sin) &&
         is_aligned(p.k_cos_sin) && is_aligned(p.keys.data, p.keys.head_stride) &&
         is_aligned(p.values.data, p.values.head_stride);
}

void prepare_qkv(const QkvParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  if (can_hold_heads(p)) return launch_held(p, stream);
  const auto kernel = p.storage == Storage::kF32    ? prepare_qkv_kernel<Storage::kF32>
                      : p.storage == Storage::kBF16 ? prepare_qkv_kernel<Storage::kBF16>
                                                    : prepare_qkv_kernel<Storage::kF8>;
  launch_early("prepare_qkv", kernel, blocks(p.num_tokens * p.token_blocks), kQkvWarps * 32,
               static_cast<size_t>(qkv_shared_bytes(p.keys.width)), stream, p);
}

}  // namespace llmserve::cuda
