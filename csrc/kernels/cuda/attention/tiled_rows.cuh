// What a warp of tiled_attention.cuh does: the rows of a tile and what they see, loads from the
// cache, scores, weights, sums, and merging of spans.
#pragma once

#include "kernels/cuda/attention/cache_rows.cuh"
#include "kernels/cuda/attention/tiled_kernels.h"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/mma.cuh"

namespace llmserve::cuda {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kUnit = kTiledUnit;
constexpr int kHalf = 32;  // positions of which a lane has one each
static_assert(kUnit == 2 * kHalf);
// Host functions' values, which device code may use.
template <int kDim>
constexpr int kStrideOf = tiled_stride(kDim);
template <int kDim>
constexpr bool kHoldsQueryOf = tiled_holds_query(kDim);
template <int kDim>
constexpr bool kRowsHoldQueryOf = tiled_rows_hold_query(kDim);
template <int kDim>
constexpr bool kRowsHoldMergedOf = tiled_rows_hold_merged(kDim);
template <int kDim>
constexpr int kStagesOf = tiled_stages(kDim);
template <int kDim, Storage kStorage>
constexpr int kSplitWarpElements =
    static_cast<int>(tiled_split_warp_bytes(kDim, kStorage == Storage::kF8)) / 2;

// What a block works on: rows [first_row, first_row + kRows) of a sequence and KV head, row r being
// query head kv_head * group + r % group of token r / group.
struct RowTile {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_row;
  int num_rows;        // of the sequence
  int group;           // H / K
  int first_position;  // of the sequence's first token of the step
  int first_seen;      // the first position that any row of the tile sees
  int last_seen;

  __device__ __forceinline__ int position(int64_t row) const {
    return first_position + static_cast<int>(row) / group;
  }
  // Whether some row of the tile sees each position of the unit that begins here.
  __device__ __forceinline__ bool sees_unit(int begin) const {
    return begin >= first_seen && begin + kUnit - 1 <= last_seen;
  }
};

__device__ __forceinline__ int first_seen_from(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

__device__ __forceinline__ RowTile find_rows(const AttentionParams& p, int64_t sequence,
                                             int64_t kv_head, int64_t first_row, int tile_rows) {
  RowTile tile{};
  tile.sequence = sequence;
  tile.kv_head = kv_head;
  tile.first_row = first_row;
  tile.group = static_cast<int>(p.num_heads / p.keys.num_heads);
  const int num_tokens = p.query_starts[sequence + 1] - p.query_starts[sequence];
  tile.num_rows = num_tokens * tile.group;
  tile.first_position = p.kv_lens[sequence] - num_tokens;
  const int64_t end = first_row + tile_rows < tile.num_rows ? first_row + tile_rows : tile.num_rows;
  tile.first_seen = first_seen_from(tile.position(first_row), p.window);
  tile.last_seen = tile.position(end - 1);
  return tile;
}

// The block of the cache that has a lane's position; -1 if no row of the tile sees it. Zeros take
// its place then, so that what lies there (NaN, say) cannot matter.
__device__ __forceinline__ int32_t find_block(const AttentionParams& p, const RowTile& rows,
                                              int position) {
  if (position < rows.first_seen || position > rows.last_seen) return -1;
  const auto block_size = static_cast<int>(p.keys.block_size);
  return p.block_tables[rows.sequence * p.max_blocks + position / block_size];
}

// Where a position lies in its block of keys and of values alike, in elements; -1 without a block.
__device__ __forceinline__ int64_t find_position(const AttentionParams& p, const RowTile& rows,
                                                 int32_t block, int position) {
  if (block < 0) return -1;
  const auto block_size = static_cast<int>(p.keys.block_size);
  return head_offset(p.keys, block, rows.kv_head) + position % block_size * p.keys.width;
}

// The scale of a position in f8; 0 without a block.
template <Storage kStorage>
__device__ __forceinline__ float find_scale(const AttentionParams& p, const CachePart& part,
                                            const RowTile& rows, int32_t block, int position) {
  if constexpr (kStorage != Storage::kF8) return 0.0f;
  if (block < 0) return 0.0f;
  const auto block_size = static_cast<int>(p.keys.block_size);
  return head_scales(part, block, rows.kv_head)[position % block_size];
}

// From row to row of what is copied from the cache, in bytes: codes lie as they are.
template <int kDim, Storage kStorage>
constexpr int kRowBytes = kStorage == Storage::kF8 ? kDim : kStrideOf<kDim> * 2;

// kHalf rows of keys, of values or, where both are given, of both, to shared memory, by kThreads
// threads; row i begins where lane i of each warp says. If `is_whole`, each of them does.
template <int kDim, int kThreads, Storage kStorage, int kRow = kRowBytes<kDim, kStorage>>
__device__ __forceinline__ void load_half(const void* first, const void* second, int64_t offset,
                                          bool is_whole, std::byte* to, std::byte* second_to) {
  constexpr int kSize = kStorage == Storage::kF8 ? 1 : 2;
  constexpr int kChunks = kDim * kSize / 16;  // a row
  const auto copy = [&](bool skips) {
#pragma unroll
    for (int e = threadIdx.x % kThreads; e < kHalf * kChunks; e += kThreads) {  // whole warps
      const int row = e / kChunks;
      const int at = e % kChunks * 16;
      const int64_t begin = __shfl_sync(kAllLanes, offset, row);
      const bool is_there = !skips || begin >= 0;
      const int64_t from = is_there ? begin * kSize + at : 0;
      const int target = row * kRow + at;
      copy_async(to + target, static_cast<const std::byte*>(first) + from, is_there);
      if (second)
        copy_async(second_to + target, static_cast<const std::byte*>(second) + from, is_there);
    }
  };
  if (is_whole)
    copy(false);
  else
    copy(true);
}

// Four codes as bf16, times what `factors` has twice.
__device__ __forceinline__ void widen_word(uint32_t word, uint32_t factors, uint32_t* to) {
  to[0] = widen_codes((word & 0xffu) << 8 | (word & 0xff00u) << 16, factors);
  to[1] = widen_codes((word >> 8 & 0xff00u) | (word & 0xff000000u), factors);
}

// kHalf rows of codes as bf16, each times the scale of the lane that has its position.
template <int kDim, int kThreads>
__device__ __forceinline__ void widen_half(const std::byte* codes, float scale, uint16_t* to) {
  constexpr int kWords = kDim / 4;  // of 4 codes, a row
#pragma unroll
  for (int e = threadIdx.x % kThreads; e < kHalf * kWords; e += kThreads) {  // whole warps
    const int row = e / kWords;
    const float factor = __shfl_sync(kAllLanes, scale, row);
    const uint32_t factors = pack_bf16(factor, factor);
    const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[e];
    widen_word(word, factors,
               reinterpret_cast<uint32_t*>(to + row * kStrideOf<kDim> + e % kWords * 4));
  }
}

// The queries of rows [first_row, first_row + kRows) as bf16, by the whole block; zeros beyond the
// last row.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const RowTile& rows,
                                             uint16_t* to) {
  const int64_t first_token = p.query_starts[rows.sequence];
#pragma unroll 4
  for (int e = threadIdx.x; e < kRows * kDim / 2; e += kThreads) {
    const int row = e / (kDim / 2);
    const int column = e % (kDim / 2) * 2;
    uint32_t pair = 0;
    const int r = static_cast<int>(rows.first_row) + row;
    if (r < rows.num_rows) {
      const int64_t head = rows.kv_head * rows.group + r % rows.group;
      const float* from =
          p.q + (first_token + r / rows.group) * p.q_token_stride + head * p.q_head_stride + column;
      pair = pack_bf16(from[0], from[1]);
    }
    *reinterpret_cast<uint32_t*>(to + row * kStrideOf<kDim> + column) = pair;
  }
}

// A warp's 16 queries as fragments of A.
template <int kDim>
__device__ __forceinline__ void hold_queries(uint32_t (&held)[kDim / 16][4],
                                             const uint16_t* queries) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    load_matrices(held[step], queries + (lane / 8 % 2 * 8 + lane % 8) * kStrideOf<kDim> +
                                  step * 16 + lane / 16 * 8);
  }
}

// What a lane's two rows of 16 (0: lane / 4, 1: 8 more) see. Rows beyond the last one see what the
// warp's first row does: nobody asks what they come to.
struct Sight {
  int first[2];
  int last[2];
  int warp_first;  // of any row of the warp
  int warp_last;
  int all_first;  // of every row of the warp
  int all_last;
};
__device__ __forceinline__ Sight find_sight(const RowTile& rows, int64_t warp_row, int window) {
  Sight sight{};
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const int64_t row = warp_row + threadIdx.x % 32 / 4 + g * 8;
    sight.last[g] = rows.position(row < rows.num_rows ? row : warp_row);
    sight.first[g] = first_seen_from(sight.last[g], window);
  }
  const int64_t end = warp_row + kTiledRows < rows.num_rows ? warp_row + kTiledRows : rows.num_rows;
  sight.warp_last = rows.position(end - 1);
  sight.warp_first = first_seen_from(rows.position(warp_row), window);
  sight.all_last = rows.position(warp_row);
  sight.all_first = first_seen_from(sight.warp_last, window);
  return sight;
}

// s = q k^T of kPairs * 16 positions: fragments of C, of 8 positions each.
template <int kDim, bool kHoldsQuery, int kPairs>
__device__ __forceinline__ void scores(float (*s)[4], const uint32_t (&held)[kDim / 16][4],
                                       const uint16_t* query, const uint16_t* keys) {
  constexpr int kStride = kStrideOf<kDim>;
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
#pragma unroll
  for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    if constexpr (kHoldsQuery) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[step][i];
    } else {
      load_matrices(a, query + (matrix % 2 * 8 + lane % 8) * kStride + step * 16 + matrix / 2 * 8);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {  // 16 positions: two fragments of B
      uint32_t b[4];
      load_matrices(
          b, keys + (pair * 16 + matrix / 2 * 8 + lane % 8) * kStride + step * 16 + matrix % 2 * 8);
      multiply_add(s[2 * pair], a, b[0], b[1]);
      multiply_add(s[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// A unit's scores to powers of 2, -inf where the row does not see the position.
__device__ __forceinline__ void scale_and_mask(float (&s)[8][4], const AttentionParams& p,
                                               const Sight& sight, int begin) {
  const float scale = p.soft_cap > 0 ? p.scale : p.scale * kLog2E;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= scale;
  }
  if (p.soft_cap > 0) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = p.soft_cap * v_tanh(s[n][i] / p.soft_cap) * kLog2E;
    }
  }
  if (begin >= sight.all_first && begin + kUnit - 1 <= sight.all_last) return;  // the whole warp
  const int position = begin + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = position + n * 8 + i % 2;
      if (at < sight.first[i / 2] || at > sight.last[i / 2]) s[n][i] = -INFINITY;
    }
  }
}

// The largest of a unit's scores, of a lane's two rows. NaN is passed over: the row's weights have
// it all the same.
__device__ __forceinline__ void largest_scores(const float (&s)[8][4], float (&m)[2]) {
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    m[g] = fmaxf(s[0][2 * g], s[0][2 * g + 1]);
#pragma unroll
    for (int n = 1; n < 8; ++n) m[g] = fmaxf(m[g], fmaxf(s[n][2 * g], s[n][2 * g + 1]));
    m[g] = fmaxf(m[g], __shfl_xor_sync(kAllLanes, m[g], 1));
    m[g] = fmaxf(m[g], __shfl_xor_sync(kAllLanes, m[g], 2));
  }
}

// A maximum to subtract: -inf, of a row that has seen nothing yet, would give NaN.
__device__ __forceinline__ float finite_or_zero(float m) { return m == -INFINITY ? 0.0f : m; }

// A unit's weights relative to the rows' maxima, as fragments of A of 16 positions each.
__device__ __forceinline__ void weigh(const float (&s)[8][4], const float (&m)[2],
                                      uint32_t (&weights)[4][4]) {
  const float base[2] = {finite_or_zero(m[0]), finite_or_zero(m[1])};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      weights[n / 2][n % 2 * 2 + g] =
          pack_bf16(fast_exp2(s[n][2 * g] - base[g]), fast_exp2(s[n][2 * g + 1] - base[g]));
    }
  }
}

// The sum of a unit's weights, by a product with ones: a fragment of C whose columns are alike.
__device__ __forceinline__ void sum_weights(const uint32_t (&weights)[4][4], float (&sum)[4]) {
  constexpr uint32_t kOnes = 0x3f803f80u;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_add(sum, weights[step], kOnes, kOnes);
}

// A unit's weights times the columns [16 n, 16 n + 16) of its values: two fragments of C.
template <int kDim>
__device__ __forceinline__ void weigh_values(const uint32_t (&weights)[4][4],
                                             const uint16_t* values, int n, float (&left)[4],
                                             float (&right)[4]) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const uint16_t* from =
      values + (matrix % 2 * 8 + lane % 8) * kStrideOf<kDim> + n * 16 + matrix / 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) left[i] = right[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t b[4];
    load_transposed(b, from + step * 16 * kStrideOf<kDim>);
    multiply_add(left, weights[step], b[0], b[1]);
    multiply_add(right, weights[step], b[2], b[3]);
  }
}

// A lane's share of 16 rows of a span so far: of its two rows the maximum, as a power of 2, and the
// sum of the weights, and fragments of C of the output.
template <int kDim>
struct Running {
  float m[2];
  float sum[2];
  float o[kDim / 8][4];

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
    }
  }

  // Takes a unit's scores and values in.
  __device__ __forceinline__ void add(const float (&s)[8][4], const uint16_t* values) {
    add(s, [&](const uint32_t (&weights)[4][4], int n, float (&left)[4], float (&right)[4]) {
      weigh_values<kDim>(weights, values, n, left, right);
    });
  }
  // Or what `weigh_some` makes of weights and 16 columns of the values.
  template <class Weigh>
  __device__ __forceinline__ void add(const float (&s)[8][4], const Weigh& weigh_some) {
    float largest[2];
    largest_scores(s, largest);
    float scale[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      largest[g] = fmaxf(m[g], largest[g]);
      scale[g] = fast_exp2(m[g] - finite_or_zero(largest[g]));
      m[g] = largest[g];
    }
    uint32_t weights[4][4];
    weigh(s, m, weights);
    float sums[4];
    sum_weights(weights, sums);
#pragma unroll
    for (int g = 0; g < 2; ++g) sum[g] = v_fma(sum[g], scale[g], sums[2 * g]);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      float left[4];
      float right[4];
      weigh_some(weights, n, left, right);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[2 * n][i] = v_fma(o[2 * n][i], scale[i / 2], left[i]);
        o[2 * n + 1][i] = v_fma(o[2 * n + 1][i], scale[i / 2], right[i]);
      }
    }
  }
};

// How much of what was merged so far and of the next span goes into both.
struct Merge {
  float m;
  float scale_old;
  float scale_new;
};
__device__ __forceinline__ Merge merge(float old_m, float new_m) {
  const float m = fmaxf(old_m, new_m);
  const float base = finite_or_zero(m);
  return {m, fast_exp2(old_m - base), fast_exp2(new_m - base)};
}
__device__ __forceinline__ float merged(const Merge& both, float old_value, float new_value) {
  return v_fma(new_value, both.scale_new, old_value * both.scale_old);
}
template <int kDim>
__device__ __forceinline__ void merge_span(Running<kDim>& whole, const Running<kDim>& span) {
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const Merge both = merge(whole.m[g], span.m[g]);
    whole.m[g] = both.m;
    whole.sum[g] = merged(both, whole.sum[g], span.sum[g]);
#pragma unroll
    for (int e = 0; e < kDim / 4; ++e) {  // two of each fragment
      float& to = whole.o[e / 2][2 * g + e % 2];
      to = merged(both, to, span.o[e / 2][2 * g + e % 2]);
    }
  }
}

// What a row's sums come to: value * kept / divisor. Its head's sink, if there are any, is one more
// score, of nothing, that is added once all spans are merged.
struct Ending {
  float kept;
  float divisor;
};
__device__ __forceinline__ Ending end_row(const AttentionParams& p, const RowTile& rows,
                                          int64_t row, float m, float sum) {
  if (p.sinks == nullptr) return {1.0f, sum};
  const float sink = p.sinks[rows.kv_head * rows.group + row % rows.group] * kLog2E;
  const Merge both = merge(m, sink);
  return {both.scale_old, v_fma(sum, both.scale_old, both.scale_new)};
}

// Where the result of a split row's span is kept.
__device__ __forceinline__ int64_t partial_index(const TiledPartials& partials, int64_t sequence,
                                                 int64_t kv_head, int64_t span, int64_t row) {
  return ((sequence * partials.kv_heads + kv_head) * partials.spans + span) * partials.rows + row;
}

// Where a row's output goes.
__device__ __forceinline__ float* output_of(const AttentionParams& p, const RowTile& rows,
                                            int64_t row) {
  const int64_t token = p.query_starts[rows.sequence] + row / rows.group;
  const int64_t head = rows.kv_head * rows.group + row % rows.group;
  return p.out + token * p.out_token_stride + head * p.out_head_stride;
}

}  // namespace
}  // namespace llmserve::cuda
