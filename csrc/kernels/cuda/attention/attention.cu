// Paged attention, plain: one block a query head of a token, tiles of 64 positions one after
// another. Right for every head dim, group, window and cap; what is faster is tested against it.
#include "kernels/cuda/attention/cache_rows.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

constexpr int kTile = 64;  // kKvTile of ops.h; cuda_backend.cpp asserts it
constexpr int kWarps = kAttentionThreads / 32;
static_assert(kTile == 64, "a lane takes two of a tile's scores");

// The sequence b that token t belongs to: query_starts[b] <= t < query_starts[b + 1]. Sequences
// without tokens are passed over.
__device__ int64_t find_sequence(const int32_t* query_starts, int64_t num_sequences,
                                 int64_t token) {
  int64_t begin = 0;
  int64_t end = num_sequences;
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    if (query_starts[middle] <= token)
      begin = middle;
    else
      end = middle;
  }
  return begin;
}

// blockIdx.x: token * H + query head, in [0, T * H): the one axis of a grid that is long enough.
// Shared memory: q [D], the running output o [Dv], a tile's scores and then weights p [64].
// Thread i owns o[i], o[i + blockDim.x], …
template <Storage kStorage>
__global__ void __launch_bounds__(kAttentionThreads) attention_kernel(AttentionParams p) {
  LLMSERVE_DYNAMIC_SHARED(float, shared);
  const int64_t head_dim = p.keys.width;
  const int64_t value_dim = p.values.width;
  float* q = shared;
  float* o = q + head_dim;
  float* weights = o + value_dim;
  const int64_t token = blockIdx.x / p.num_heads;
  const int64_t head = blockIdx.x % p.num_heads;
  const int64_t kv_head = head / (p.num_heads / p.keys.num_heads);
  const int64_t sequence = find_sequence(p.query_starts, p.num_sequences, token);
  const int64_t position =
      p.kv_lens[sequence] - (p.query_starts[sequence + 1] - token);  // of the token itself
  const int64_t first = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  const int32_t* block_table = p.block_tables + sequence * p.max_blocks;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  for (int64_t i = threadIdx.x; i < head_dim; i += blockDim.x)
    q[i] = p.q[token * p.q_token_stride + head * p.q_head_stride + i];
  for (int64_t i = threadIdx.x; i < value_dim; i += blockDim.x) o[i] = 0.0f;
  float m = -INFINITY;
  float l = 0.0f;

  // Positions [begin, end) of each tile: only rows that the token sees are read, so that what lies
  // in unused slots (NaN, say) cannot matter.
  for (int64_t tile = first / kTile * kTile; tile <= position; tile += kTile) {
    const int64_t begin = tile < first ? first : tile;
    const int64_t end = tile + kTile < position + 1 ? tile + kTile : position + 1;
    const int count = static_cast<int>(end - begin);
    __syncthreads();  // q and o are set; the last tile's weights have been read
    for (int j = warp; j < count; j += kWarps) {
      const CacheRow<kStorage> key(p.keys, block_table, kv_head, static_cast<int32_t>(begin + j));
      float dot = 0.0f;
      for (int64_t i = lane; i < head_dim; i += 32) dot = v_fma(q[i], key[i], dot);
      float score = warp_sum(dot) * p.scale;
      if (p.soft_cap > 0) score = p.soft_cap * v_tanh(score / p.soft_cap);
      if (lane == 0) weights[j] = score;
    }
    __syncthreads();
    // Every warp computes the same maximum and sum; the first one writes the weights.
    const float s0 = lane < count ? weights[lane] : -INFINITY;
    const float s1 = lane + 32 < count ? weights[lane + 32] : -INFINITY;
    const float tile_m = warp_max(v_max(s0, s1));
    const float p0 = lane < count ? v_exp(s0 - tile_m) : 0.0f;
    const float p1 = lane + 32 < count ? v_exp(s1 - tile_m) : 0.0f;
    const float tile_l = warp_sum(p0 + p1);
    __syncthreads();  // every warp has read the scores
    if (warp == 0) {
      weights[lane] = p0;
      weights[lane + 32] = p1;
    }
    __syncthreads();
    const float m_new = v_max(m, tile_m);
    const float scale_old = v_exp(m - m_new);
    const float scale_tile = v_exp(tile_m - m_new);
    for (int64_t i = threadIdx.x; i < value_dim; i += blockDim.x) {
      float sum = 0.0f;
      for (int j = 0; j < count; ++j) {
        const CacheRow<kStorage> value(p.values, block_table, kv_head,
                                       static_cast<int32_t>(begin + j));
        sum = v_fma(weights[j], value[i], sum);
      }
      o[i] = o[i] * scale_old + sum * scale_tile;
    }
    l = l * scale_old + tile_l * scale_tile;
    m = m_new;
  }
  float kept = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    const float largest = v_max(m, sink);
    kept = v_exp(m - largest);
    l = l * kept + v_exp(sink - largest);
  }
  float* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  for (int64_t i = threadIdx.x; i < value_dim; i += blockDim.x) out[i] = o[i] * kept / l;
}

}  // namespace

void paged_attention(const AttentionParams& p, cudaStream_t stream) {
  const int64_t num_blocks = p.num_tokens * p.num_heads;  // checked against the grid by the backend
  if (num_blocks == 0) return;
  const auto kernel = p.storage == Storage::kF32    ? attention_kernel<Storage::kF32>
                      : p.storage == Storage::kBF16 ? attention_kernel<Storage::kBF16>
                                                    : attention_kernel<Storage::kF8>;
  const auto shared =
      static_cast<size_t>(attention_shared_bytes(p.keys.width, p.values.width, kTile));
  launch("paged_attention", kernel, blocks(num_blocks), kAttentionThreads, shared, stream, p);
}

}  // namespace llmserve::cuda
