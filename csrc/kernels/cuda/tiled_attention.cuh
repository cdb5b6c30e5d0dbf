// Paged attention by tensor cores, over caches in bf16 or, widened to it in shared memory, f8. One
// program for decoding and for prompts: the rows of a tile are query heads of tokens that read the
// same KV head, 16 to a warp, whatever tokens they belong to.
//
// A row walks the KV in tiles of kTiledTile positions and spans of kTiledSpan, both anchored at
// position 0. Within a span its running maximum, sum and output are rescaled from tile to tile;
// spans start afresh and are merged in position order. A tile or span of which a row sees nothing
// leaves it as it is, bit by bit. So a row's bits depend on its own tokens alone: not on whether
// spans are computed by one block one after another (prompts) or by a block each (decoding), nor on
// which rows are beside it. Dao 2023 (FlashAttention-2), section 3.1; Dao et al. 2023
// (Flash-Decoding).
#pragma once

#include "kernels/cuda/cache_rows.cuh"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tiled_kernels.h"

namespace llmserve::cuda {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kTile = kTiledTile;
static_assert(kTile == 32, "a lane finds the row of one position of a tile");
// Host functions' values, which device code may use.
template <int kDim>
constexpr int kStrideOf = tiled_stride(kDim);
template <int kDim>
constexpr bool kHoldsQueryOf = tiled_holds_query(kDim);

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

// The 32 positions from `begin` of keys and values to shared memory; zeros for those that no row of
// the tile sees, so that what lies there (NaN, say) cannot matter, and their blocks are not looked
// up. A lane finds where one position's row begins, and tells the others.
template <int kDim, int kWarps>
__device__ __forceinline__ void load_tile(const AttentionParams& p, const RowTile& rows, int begin,
                                          uint16_t* keys, uint16_t* values) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes, a row
  constexpr int kStride = kStrideOf<kDim>;
  const int lane = threadIdx.x % 32;
  const int mine = begin + lane;
  const bool is_seen = mine >= rows.first_seen && mine <= rows.last_seen;
  const int32_t* table = p.block_tables + rows.sequence * p.max_blocks;
  const int64_t offset = is_seen ? row_offset(p.keys, table, rows.kv_head, mine) : -1;
  for (int e = threadIdx.x; e < kTile * kChunks; e += 32 * kWarps) {  // whole warps
    const int row = e / kChunks;
    const int column = e % kChunks * 8;
    const int64_t from = __shfl_sync(kAllLanes, offset, row);
    const int64_t source = from < 0 ? 0 : from + column;
    const int to = row * kStride + column;
    copy_async(keys + to, static_cast<const uint16_t*>(p.keys.data) + source, from >= 0);
    copy_async(values + to, static_cast<const uint16_t*>(p.values.data) + source, from >= 0);
  }
}

// The scales of the position that a lane has.
struct LaneScales {
  float key = 0.0f;
  float value = 0.0f;
};

// The same of a cache in f8: codes as they are, rows of kDim bytes, and the lane's scales.
template <int kDim, int kWarps>
__device__ __forceinline__ LaneScales load_codes(const AttentionParams& p, const RowTile& rows,
                                                 int begin, uint8_t* keys, uint8_t* values) {
  constexpr int kChunks = kDim / 16;  // of 16 bytes, a row
  const int mine = begin + static_cast<int>(threadIdx.x % 32);
  const bool is_seen = mine >= rows.first_seen && mine <= rows.last_seen;
  const int32_t* table = p.block_tables + rows.sequence * p.max_blocks;
  const int64_t offset = is_seen ? row_offset(p.keys, table, rows.kv_head, mine) : -1;
  LaneScales scales;
  if (is_seen) {
    scales.key = row_scale(p.keys, table, rows.kv_head, mine);
    scales.value = row_scale(p.values, table, rows.kv_head, mine);
  }
  for (int e = threadIdx.x; e < kTile * kChunks; e += 32 * kWarps) {  // whole warps
    const int row = e / kChunks;
    const int64_t from = __shfl_sync(kAllLanes, offset, row);
    const int64_t source = from < 0 ? 0 : from + e % kChunks * 16;
    copy_async(keys + e * 16, static_cast<const uint8_t*>(p.keys.data) + source, from >= 0);
    copy_async(values + e * 16, static_cast<const uint8_t*>(p.values.data) + source, from >= 0);
  }
  return scales;
}

// A tile of codes as bf16, each row times the scale of the lane that has its position.
template <int kDim, int kWarps>
__device__ __forceinline__ void widen_tile(const uint8_t* codes, float scale, uint16_t* tile) {
  constexpr int kWords = kDim / 4;                                   // of 4 codes, a row
  for (int e = threadIdx.x; e < kTile * kWords; e += 32 * kWarps) {  // whole warps
    const int row = e / kWords;
    const float factor = __shfl_sync(kAllLanes, scale, row);
    const uint32_t factors = pack_bf16(factor, factor);
    const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[e];
    auto* to = reinterpret_cast<uint32_t*>(tile + row * kStrideOf<kDim> + e % kWords * 4);
    to[0] = widen_codes((word & 0xffu) << 8 | (word & 0xff00u) << 16, factors);
    to[1] = widen_codes((word >> 8 & 0xff00u) | (word & 0xff000000u), factors);
  }
}

// A lane's share of 16 rows: row g of its two (0: g, 1: g + 8) has maximum m[g], in powers of 2.
template <int kDim>
struct Running {
  float m[2];
  float sum[4];  // of the weights, as a fragment of C whose columns are all alike
  float o[kDim / 8][4];

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
    }
  }
};

// A maximum to subtract: -inf, of a row that has seen nothing yet, would give NaN.
__device__ __forceinline__ float finite_or_zero(float m) { return m == -INFINITY ? 0.0f : m; }

// s = q k^T for a tile: 4 fragments of C, of 8 positions each.
template <int kDim, bool kHoldsQuery>
__device__ __forceinline__ void scores(float (&s)[4][4], const uint32_t (&held)[kDim / 16][4],
                                       const uint16_t* query, const uint16_t* keys) {
  constexpr int kStride = kStrideOf<kDim>;
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
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
    for (int pair = 0; pair < 2; ++pair) {  // 16 positions: two fragments of B
      uint32_t b[4];
      load_matrices(
          b, keys + (pair * 16 + matrix / 2 * 8 + lane % 8) * kStride + step * 16 + matrix % 2 * 8);
      multiply_add(s[2 * pair], a, b[0], b[1]);
      multiply_add(s[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// Scores to powers of 2, -inf where the row does not see the position.
__device__ __forceinline__ void scale_and_mask(float (&s)[4][4], const AttentionParams& p,
                                               const int (&first)[2], const int (&last)[2],
                                               int begin) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = begin + n * 8 + lane % 4 * 2 + i % 2;
      float x = s[n][i] * p.scale;
      if (p.soft_cap > 0) x = p.soft_cap * v_tanh(x / p.soft_cap);
      const bool is_seen = position >= first[i / 2] && position <= last[i / 2];
      s[n][i] = is_seen ? x * kLog2E : -INFINITY;
    }
  }
}

// Takes a tile's scores and values into what the rows have so far. Weights are rounded to bf16, and
// so summed, by a product with ones.
template <int kDim>
__device__ __forceinline__ void take_in(Running<kDim>& run, float (&s)[4][4],
                                        const uint16_t* values) {
  constexpr int kStride = kStrideOf<kDim>;
  const int lane = threadIdx.x % 32;
  float scale[2];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    float m = run.m[g];
#pragma unroll
    for (int n = 0; n < 4; ++n) m = v_max(m, v_max(s[n][2 * g], s[n][2 * g + 1]));
    m = v_max(m, __shfl_xor_sync(kAllLanes, m, 1));
    m = v_max(m, __shfl_xor_sync(kAllLanes, m, 2));
    const float base = finite_or_zero(m);
    scale[g] = fast_exp2(run.m[g] - base);
    run.m[g] = m;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      s[n][2 * g] = fast_exp2(s[n][2 * g] - base);
      s[n][2 * g + 1] = fast_exp2(s[n][2 * g + 1] - base);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) run.sum[i] *= scale[i / 2];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) run.o[n][i] *= scale[i / 2];
  }
  constexpr uint32_t kOnes = 0x3f803f80u;
  const int matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // 16 positions
    const float (&left)[4] = s[2 * step];
    const float (&right)[4] = s[2 * step + 1];
    const uint32_t a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                           pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
    multiply_add(run.sum, a, kOnes, kOnes);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_transposed(
          b, values + (step * 16 + matrix % 2 * 8 + lane % 8) * kStride + n * 16 + matrix / 2 * 8);
      multiply_add(run.o[2 * n], a, b[0], b[1]);
      multiply_add(run.o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// How much of what was merged so far and of the next span goes into both.
struct Merge {
  float m;
  float scale_old;
  float scale_new;
};
__device__ __forceinline__ Merge merge(float old_m, float new_m) {
  const float m = v_max(old_m, new_m);
  const float base = finite_or_zero(m);
  return {m, fast_exp2(old_m - base), fast_exp2(new_m - base)};
}

// Where the result of a split row's span is kept.
__device__ __forceinline__ int64_t partial_index(const TiledPartials& partials, int64_t sequence,
                                                 int64_t kv_head, int64_t span, int64_t row) {
  return ((sequence * partials.kv_heads + kv_head) * partials.spans + span) * partials.rows + row;
}

// blockIdx: (row tile from the last to the first, KV head, sequence), or (span, KV head, sequence)
// if kIsSplit. Sequences whose rows fit 16 are the split kernel's, all others the other's. Shared
// memory, in this order: two tiles of keys and values, or one and two tiles of codes, which are
// smaller; the queries; what is merged, element i of thread t at [i * threads + t], in the queries'
// place if they are held in registers.
template <int kDim, int kWarps, bool kIsSplit, Storage kStorage>
__global__ void __launch_bounds__(32 * kWarps)
    tiled_kernel(AttentionParams p, TiledPartials partials) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kRows = kTiledRows * kWarps;
  constexpr int kStride = kStrideOf<kDim>;
  constexpr bool kHoldsQuery = kHoldsQueryOf<kDim>;
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  uint16_t* tiles = shared;
  auto* codes = reinterpret_cast<uint8_t*>(tiles + 2 * kTile * kStride);
  uint16_t* query = tiles + 4 * kTile * kStride;
  auto* merged = reinterpret_cast<float*>(kHoldsQuery ? query : query + kRows * kStride);

  const int64_t first_row =
      kIsSplit ? 0 : (static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x) * kRows;
  const int64_t sequence = blockIdx.z;
  const RowTile rows = find_rows(p, sequence, blockIdx.y, first_row, kRows);
  if (first_row >= rows.num_rows || kIsSplit != (rows.num_rows <= kTiledRows)) return;
  const int first_span = kIsSplit ? static_cast<int>(blockIdx.x) : rows.first_seen / kTiledSpan;
  const int last_span = kIsSplit ? static_cast<int>(blockIdx.x) : rows.last_seen / kTiledSpan;
  if ((first_span + 1) * kTiledSpan <= rows.first_seen || first_span * kTiledSpan > rows.last_seen)
    return;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t warp_row = first_row + warp * kTiledRows;
  for (int e = threadIdx.x; e < kRows * kDim; e += kThreads) {
    const int64_t row = first_row + e / kDim;
    float value = 0.0f;
    if (row < rows.num_rows) {
      const int64_t token = p.query_starts[sequence] + row / rows.group;
      const int64_t head = rows.kv_head * rows.group + row % rows.group;
      value = p.q[token * p.q_token_stride + head * p.q_head_stride + e % kDim];
    }
    query[e / kDim * kStride + e % kDim] = float_to_bf16(value);
  }
  __syncthreads();
  uint16_t* warp_query = query + warp * kTiledRows * kStride;
  uint32_t held[kDim / 16][4] = {};
  if constexpr (kHoldsQuery) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      load_matrices(held[step], warp_query + (lane / 8 % 2 * 8 + lane % 8) * kStride + step * 16 +
                                    lane / 16 * 8);
    }
    __syncthreads();
  }

  int first[2];  // the positions that this lane's rows see; rows beyond the end see none
  int last[2];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const int64_t row = warp_row + lane / 4 + g * 8;
    last[g] = row < rows.num_rows ? rows.position(row) : -1;
    first[g] = row < rows.num_rows ? first_seen_from(last[g], p.window) : 0;
  }
  const bool warp_has_rows = warp_row < rows.num_rows;
  const int64_t warp_end =
      warp_row + kTiledRows < rows.num_rows ? warp_row + kTiledRows : rows.num_rows;
  const int warp_first = warp_has_rows ? first_seen_from(rows.position(warp_row), p.window) : 0;
  const int warp_last = warp_has_rows ? rows.position(warp_end - 1) : -1;

  Running<kDim> run;
  float merged_m[2] = {-INFINITY, -INFINITY};
  float merged_sum[2] = {0.0f, 0.0f};
  if constexpr (!kIsSplit) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) merged[i * kThreads + threadIdx.x] = 0.0f;
  }

  const int begin_seen = rows.first_seen / kTile * kTile;
  int begin = first_span * kTiledSpan > begin_seen ? first_span * kTiledSpan : begin_seen;
  int stage = 0;
  LaneScales scales;  // of the tile that is on its way
  const auto load = [&](int from) {
    if constexpr (kStorage == Storage::kF8) {
      uint8_t* to = codes + stage * 2 * kTile * kDim;
      scales = load_codes<kDim, kWarps>(p, rows, from, to, to + kTile * kDim);
    } else {
      uint16_t* to = tiles + stage * 2 * kTile * kStride;
      load_tile<kDim, kWarps>(p, rows, from, to, to + kTile * kStride);
    }
  };
  load(begin);
  for (int span = first_span; span <= last_span; ++span) {
    run.clear();
    const int span_end = (span + 1) * kTiledSpan;
    for (; begin < span_end && begin <= rows.last_seen; begin += kTile) {
      wait_for_copies();
      __syncthreads();  // the tile is there, and nobody reads the other one any more
      uint16_t* keys = kStorage == Storage::kF8 ? tiles : tiles + stage * 2 * kTile * kStride;
      const uint8_t* arrived = codes + stage * 2 * kTile * kDim;
      const LaneScales of_arrived = scales;
      stage ^= 1;
      const int next = begin + kTile;
      if (next <= rows.last_seen && (!kIsSplit || next < span_end)) load(next);
      if constexpr (kStorage == Storage::kF8) {
        widen_tile<kDim, kWarps>(arrived, of_arrived.key, keys);
        widen_tile<kDim, kWarps>(arrived + kTile * kDim, of_arrived.value, keys + kTile * kStride);
        __syncthreads();  // all of it is widened
      }
      if (begin > warp_last || begin + kTile <= warp_first) continue;  // the whole warp
      float s[4][4];
      scores<kDim, kHoldsQuery>(s, held, warp_query, keys);
      scale_and_mask(s, p, first, last, begin);
      take_in<kDim>(run, s, keys + kTile * kStride);
    }
    if constexpr (!kIsSplit) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const Merge both = merge(merged_m[g], run.m[g]);
        merged_m[g] = both.m;
        merged_sum[g] = merged_sum[g] * both.scale_old + run.sum[2 * g] * both.scale_new;
#pragma unroll
        for (int e = 0; e < kDim / 4; ++e) {  // two of each fragment
          float& to = merged[(g * (kDim / 4) + e) * kThreads + threadIdx.x];
          to = to * both.scale_old + run.o[e / 2][2 * g + e % 2] * both.scale_new;
        }
      }
    }
  }

  // A split row whose sequence has one span is done, too: merging it alone would change nothing.
  const bool is_partial = kIsSplit && rows.first_seen / kTiledSpan != rows.last_seen / kTiledSpan;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const int64_t row = warp_row + lane / 4 + g * 8;
    if (row >= rows.num_rows) continue;
    float* to;
    float divisor = 1.0f;
    if (is_partial) {
      const int64_t at = partial_index(partials, sequence, rows.kv_head, first_span, row);
      to = partials.outputs + at * kDim;
      if (lane % 4 == 0) {
        partials.maxima[at] = run.m[g];
        partials.sums[at] = run.sum[2 * g];
      }
    } else {
      const int64_t token = p.query_starts[sequence] + row / rows.group;
      const int64_t head = rows.kv_head * rows.group + row % rows.group;
      to = p.out + token * p.out_token_stride + head * p.out_head_stride;
      divisor = kIsSplit ? run.sum[2 * g] : merged_sum[g];
    }
#pragma unroll
    for (int e = 0; e < kDim / 4; ++e) {
      const float value = kIsSplit ? run.o[e / 2][2 * g + e % 2]
                                   : merged[(g * (kDim / 4) + e) * kThreads + threadIdx.x];
      to[e / 2 * 8 + lane % 4 * 2 + e % 2] = value / divisor;
    }
  }
}

// blockIdx: (row, KV head, sequence); threads stride over the dims. Spans in position order, as in
// tiled_kernel.
__global__ void merge_spans_kernel(AttentionParams p, TiledPartials partials) {
  const int64_t row = blockIdx.x;
  const RowTile rows = find_rows(p, blockIdx.z, blockIdx.y, 0, kTiledRows);
  const int first_span = rows.first_seen / kTiledSpan;
  const int last_span = rows.last_seen / kTiledSpan;
  if (row >= rows.num_rows || rows.num_rows > kTiledRows || first_span == last_span) return;
  const int64_t token = p.query_starts[rows.sequence] + row / rows.group;
  const int64_t head = rows.kv_head * rows.group + row % rows.group;
  float* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  const int64_t width = p.values.width;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    float m = -INFINITY;
    float sum = 0.0f;
    float value = 0.0f;
    for (int span = first_span; span <= last_span; ++span) {
      const int64_t at = partial_index(partials, rows.sequence, rows.kv_head, span, row);
      const Merge both = merge(m, partials.maxima[at]);
      m = both.m;
      sum = sum * both.scale_old + partials.sums[at] * both.scale_new;
      value = value * both.scale_old + partials.outputs[at * width + i] * both.scale_new;
    }
    out[i] = value / sum;
  }
}

template <int kDim, Storage kStorage>
struct Kernels {
  static constexpr int kWarps = tiled_warps(kDim);
  static constexpr auto split = tiled_kernel<kDim, 1, true, kStorage>;
  static constexpr auto rows = tiled_kernel<kDim, kWarps, false, kStorage>;

  static void prepare() {
    const auto allow = [](auto kernel, int warps, bool is_split) {
      check("cudaFuncSetAttribute of attention",
            cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(tiled_shared_bytes(kDim, warps, is_split))));
    };
    allow(split, 1, true);
    allow(rows, kWarps, false);
  }

  static void run(const AttentionParams& p, const TiledPlan& plan, const TiledPartials& partials,
                  cudaStream_t stream) {
    const auto kv_heads = static_cast<unsigned>(p.keys.num_heads);
    const auto sequences = static_cast<unsigned>(p.num_sequences);
    if (plan.row_tiles > 0) {
      launch("paged_attention", rows,
             dim3(static_cast<unsigned>(plan.row_tiles), kv_heads, sequences), 32 * kWarps,
             static_cast<size_t>(tiled_shared_bytes(kDim, kWarps, false)), stream, p, partials);
    }
    for (int64_t begin = 0; plan.spans > 0 && begin < p.num_sequences;
         begin += partials.sequences) {
      AttentionParams part = p;
      part.query_starts += begin;
      part.kv_lens += begin;
      part.block_tables += begin * p.max_blocks;
      const auto count = static_cast<unsigned>(p.num_sequences - begin < partials.sequences
                                                   ? p.num_sequences - begin
                                                   : partials.sequences);
      launch("paged_attention", split, dim3(static_cast<unsigned>(plan.spans), kv_heads, count), 32,
             static_cast<size_t>(tiled_shared_bytes(kDim, 1, true)), stream, part, partials);
      if (plan.spans == 1) continue;
      launch("paged_attention", merge_spans_kernel,
             dim3(static_cast<unsigned>(plan.split_rows), kv_heads, count), row_threads(kDim), 0,
             stream, part, partials);
    }
  }
};

template <Storage kStorage>
TiledKernels tiled_kernels_of(int64_t width) {
  const auto of = [](auto kernels) {
    return TiledKernels{&decltype(kernels)::prepare, &decltype(kernels)::run};
  };
  switch (width) {
    case 64:
      return of(Kernels<64, kStorage>());
    case 80:
      return of(Kernels<80, kStorage>());
    case 96:
      return of(Kernels<96, kStorage>());
    case 128:
      return of(Kernels<128, kStorage>());
    case 256:
      return of(Kernels<256, kStorage>());
    default:
      return {};
  }
}

}  // namespace
}  // namespace llmserve::cuda
