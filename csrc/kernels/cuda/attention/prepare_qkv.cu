// What stands between the product of queries, keys and values and attention: norms of heads,
// rotation, the writing of the cache. The arithmetic of rms_norm.cu, elementwise.cu (rotary) and
// kv_cache.cu, element by element, and so their bits. Heads of usual widths are held in registers
// (prepare_held_kernel), others in shared memory.
#include <type_traits>

#include "kernels/cuda/attention/cache_rows.cuh"
#include "kernels/cuda/rows/rms.cuh"
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

// How the heads of one width lie in a warp: each in kLanes lanes, lane l of them with its fours l,
// l + kLanes, …, kFours of them. A lane has kHeads heads, whose loads are on their way together.
template <int kLanes_, int kFours_, int kHeads_>
struct Held {
  static constexpr int kLanes = kLanes_;
  static constexpr int kFours = kFours_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kSide = 32 / kLanes;          // heads side by side
  static constexpr int kWarpHeads = kHeads * kSide;  // of one kind, that a warp takes
};

struct Angles {
  Four cosines;
  Four sines;       // those of elements that come first in their pair, negated
  bool is_rotated;  // whether the four is within the rotated width
};

// Of the four `index` of a head. x * cosine + other * sine is what rotate_pair does: -(b * sine) =
// b * -sine.
__device__ __forceinline__ Angles angles_of(const float* angles, int index, int half,
                                            bool interleaved) {
  Angles a{};
  a.is_rotated = 4 * index < 2 * half;
  if (!a.is_rotated) return a;
  if (interleaved) {
    const float2 c = *reinterpret_cast<const float2*>(angles + 2 * index);
    const float2 s = *reinterpret_cast<const float2*>(angles + half + 2 * index);
    a.cosines = {{c.x, c.x, c.y, c.y}};
    a.sines = {{-s.x, s.x, -s.y, s.y}};
    return a;
  }
  const bool is_first = 4 * index < half;
  const int i = 4 * index - (is_first ? 0 : half);
  a.cosines = load_four<true>(angles, i, half);
  a.sines = load_four<true>(angles + half, i, half);
#pragma unroll
  for (int j = 0; j < 4; ++j) a.sines.at[j] = is_first ? -a.sines.at[j] : a.sines.at[j];
  return a;
}

__device__ __forceinline__ void rotate(Four& x, const Four& other, const Angles& a) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float rotated = x.at[j] * a.cosines.at[j] + other.at[j] * a.sines.at[j];
    x.at[j] = a.is_rotated ? rotated : x.at[j];
  }
}

// The other elements of a head's pairs: neighbours, or those `half` away, which another lane has,
// or, if they are kLanes fours away, the lane itself.
template <class Shape>
__device__ __forceinline__ void turn_head(Four (&x)[Shape::kFours],
                                          const Angles (&angles)[Shape::kFours], int half,
                                          bool interleaved) {
  constexpr int kLanes = Shape::kLanes;
  if (interleaved) {
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) {
      const Four& v = x[f];
      rotate(x[f], {{v.at[1], v.at[0], v.at[3], v.at[2]}}, angles[f]);
    }
    return;
  }
  if constexpr (Shape::kFours == 2) {
    if (half == 4 * kLanes) {
      const Four first = x[0];
      rotate(x[0], x[1], angles[0]);
      rotate(x[1], first, angles[1]);
      return;
    }
  }
  const int lane = threadIdx.x % kLanes;
  const int away = half / 4;
  const int partner = threadIdx.x % 32 - lane +
                      (lane < away       ? lane + away
                       : lane < 2 * away ? lane - away
                                         : lane);
  Four other;
#pragma unroll
  for (int j = 0; j < 4; ++j) other.at[j] = __shfl_sync(kAllLanes, x[0].at[j], partner);
  rotate(x[0], other, angles[0]);
}

// Over the lanes of a head: a warp of the norm's own block adds zeros beside them.
template <int kLanes>
__device__ __forceinline__ float head_sum(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// As store_row does it: the heads' fours to their row of a slot.
template <Storage kStorage, class Shape>
__device__ __forceinline__ void store_head(const CachePart& part, int64_t block, int64_t offset,
                                           int64_t head, const Four (&x)[Shape::kFours],
                                           bool is_mine) {
  const int lane = threadIdx.x % Shape::kLanes;
  const int64_t to = head_offset(part, block, head) + offset * part.row_stride;
  if constexpr (kStorage == Storage::kF8) {
    int32_t largest = 0;
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t magnitude = v_bits(x[f].at[j]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    for (int distance = Shape::kLanes / 2; distance > 0; distance /= 2) {
      const int32_t other = __shfl_xor_sync(kAllLanes, largest, distance);
      largest = other > largest ? other : largest;
    }
    if (!is_mine) return;
    const float scale = v_fp8_scale(largest);
    const bool is_finite = largest < 0x7f800000;
    const float inverse = 1.0f / scale;  // exact: a power of two
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f) {
      const int i = 4 * (lane + f * Shape::kLanes);
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto code = static_cast<uint8_t>(v_to_fp8(x[f].at[j] * inverse));
        codes |= uint32_t{code} << 8 * j;
      }
      if (i < part.width)
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(part.data) + to + i) =
            is_finite ? codes : 0;
    }
    if (lane == 0) head_scales(part, block, head)[offset] = scale;
  } else {
    using Element = std::conditional_t<kStorage == Storage::kF32, float, uint16_t>;
    if (!is_mine) return;
#pragma unroll
    for (int f = 0; f < Shape::kFours; ++f)
      store_four<true>(static_cast<Element*>(part.data) + to, 4 * (lane + f * Shape::kLanes),
                       part.width, x[f]);
  }
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

// Whether heads can be held: whole fours, aligned, whose pairs are where turn_head looks for them.
bool can_hold(const QkvParams& p) {
  const int64_t width = p.keys.width;
  const bool has_pairs = width <= 128 || p.interleaved || p.half <= 64 || p.half == 128;
  return width % 4 == 0 && width <= 256 && p.values.width == width && p.half % 4 == 0 &&
         has_pairs && is_aligned(p.q) && is_aligned(p.k) && is_aligned(p.v) &&
         is_aligned(p.q_norm, 0) && is_aligned(p.k_norm, 0) && is_aligned(p.q_cos_sin) &&
         is_aligned(p.k_cos_sin) && is_aligned(p.keys.data, p.keys.head_stride) &&
         is_aligned(p.values.data, p.values.head_stride);
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

void prepare_qkv(const QkvParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  if (can_hold(p)) return launch_held(p, stream);
  const auto kernel = p.storage == Storage::kF32    ? prepare_qkv_kernel<Storage::kF32>
                      : p.storage == Storage::kBF16 ? prepare_qkv_kernel<Storage::kBF16>
                                                    : prepare_qkv_kernel<Storage::kF8>;
  launch_early("prepare_qkv", kernel, blocks(p.num_tokens * p.token_blocks), kQkvWarps * 32,
               static_cast<size_t>(qkv_shared_bytes(p.keys.width)), stream, p);
}

}  // namespace llmserve::cuda
