// Paged attention by tensor cores where a warp would not hold a row's output, or where many query
// heads share a KV head: multi-head latent attention, above all, whose 16 to 128 heads read the
// same row of 576 elements, of which the first 512 are the value. DeepSeek-AI 2024, section 2.1.
//
// A block has a tile of 16 or 32 rows, query heads of tokens that read the same KV head, and reads
// each position once for all of them. Its eight warps share a unit's scores, by positions and by
// the two halves of a key, then its weights, a half-warp a row, and then each has its share of the
// values' columns for all rows.
//
// A row's arithmetic is the same whatever its tile and whoever is beside it. A score is the sum of
// two chains of products, one a half of the key. Units of 64 positions, relative to the largest
// score of the span so far, start at zero and are added to the span's sums, spans of 256 are merged
// in stretches of 4,096, and stretches are merged, all in position order and anchored at position
// 0. A piece of a sequence's context, which a block takes, is a span or a stretch; sequences of
// many rows have a block for all of it. So a row has the same bits in decoding, guesses, chunks and
// prompts. Dao 2023 (FlashAttention-2), section 3.1; Dao et al. 2023 (Flash-Decoding).
#pragma once

#include "kernels/cuda/attention/column_kernels.h"
#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kNever = 0x7fffffff;

// column_stride(), of a width that is known when a kernel runs, and what of it is filled.
__device__ __forceinline__ int filled_width(int width) { return (width + 15) / 16 * 16; }
__device__ __forceinline__ int padded_width(int width) { return filled_width(width) + 8; }

// Pieces of the context that a tile of rows sees: number i is the positions from (first + i) *
// length on.
struct Pieces {
  int first;
  int count;
  int length;
};
__device__ __forceinline__ Pieces find_pieces(const AttentionParams& p, const ColumnParams& c,
                                              const RowTile& rows) {
  const auto cut = [&](int length) {
    const int first = rows.first_seen / length;
    return Pieces{first, rows.last_seen / length - first + 1, length};
  };
  const Pieces spans = cut(kTiledSpan);
  const Pieces stretches = cut(kColumnStretch);
  const int64_t tiles = (rows.num_rows + c.tile_rows - 1) / c.tile_rows * p.keys.num_heads;
  const bool is_enough =
      c.takes_stretches || p.num_sequences * tiles * stretches.count >= kColumnEnoughBlocks;
  return is_enough || spans.count > c.slots ? stretches : spans;
}

__device__ __forceinline__ int64_t piece_index(const AttentionParams& p, const ColumnParams& c,
                                               const RowTile& rows, int64_t row, int64_t piece) {
  return ((rows.sequence * p.keys.num_heads + rows.kv_head) * c.rows + row) * c.slots + piece;
}

// The largest of 16 lanes, and their sum in an order of its own.
__device__ __forceinline__ float half_warp_max(float x) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

// Until a thread's copies but its last `count` halves are done.
__device__ __forceinline__ void wait_for_halves(int count) {
  if (count == 0)
    wait_for_all_but<0>();
  else if (count == 1)
    wait_for_all_but<1>();
  else
    wait_for_all_but<2>();
}
static_assert(kColumnMaxRing - 4 <= 2);

// blockIdx (KV head of a row tile from the last to the first, piece, sequence).
template <int kRowTiles, int kColumns, int kSteps, Storage kStorage>
__global__ void __launch_bounds__(kColumnThreads, 1)
    column_kernel(AttentionParams p, ColumnParams c) {
  constexpr int kRows = kTiledRows * kRowTiles;
  constexpr bool kIsF8 = kStorage == Storage::kF8;
  constexpr int kSize = kIsF8 ? 1 : 2;
  constexpr bool kHoldsQuery = kRowTiles == 1;
  constexpr int kFragments = kColumns / 8;
  const auto width = static_cast<int>(p.keys.width);
  const auto value_width = static_cast<int>(p.values.width);
  const bool has_own_values = p.values.data != p.keys.data;
  const int stride = padded_width(width);
  const int value_stride = has_own_values ? padded_width(value_width) : stride;
  // Rows as they are copied, in bytes, values behind the keys of the half.
  const int row_bytes = kIsF8 ? width : stride * 2;
  const int value_row_bytes = kIsF8 ? value_width : value_stride * 2;
  const int half_bytes = kColumnHalf * (row_bytes + (has_own_values ? value_row_bytes : 0));

  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  uint16_t* const own_query = shared;
  uint16_t* const widened = kHoldsQuery ? shared : shared + kRows * stride;
  const int widened_half = kColumnHalf * (stride + (has_own_values ? value_stride : 0));
  auto* const ring = reinterpret_cast<std::byte*>(widened + (kIsF8 ? 2 * widened_half : 0));
  auto* const score_parts = reinterpret_cast<float*>(ring + c.ring * half_bytes);
  auto* const weights = reinterpret_cast<uint16_t*>(score_parts + 2 * kRows * kColumnScoreStride);
  auto* const unit_scale = reinterpret_cast<float*>(weights + kRows * kColumnWeightStride);
  float* const merge_old = unit_scale + kRows;
  float* const merge_new = merge_old + kRows;
  float* const kept = merge_new + kRows;
  float* const divisor = kept + kRows;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int matrix = lane / 8;
  const auto kv_heads = static_cast<int>(p.keys.num_heads);
  const auto block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int64_t first_row = int64_t{block / kv_heads} * kRows;
  const RowTile rows = find_rows(p, blockIdx.z, block % kv_heads, first_row, kRows);
  const auto piece = static_cast<int>(blockIdx.y);
  Pieces pieces{0, 1, kNever};
  if (c.is_split) pieces = find_pieces(p, c, rows);
  if (first_row >= rows.num_rows || (rows.num_rows <= kColumnSplitRows) != c.is_split ||
      piece >= pieces.count) {
    wait_for_previous();
    return;
  }
  int begin = rows.first_seen / kUnit * kUnit;
  int end = rows.last_seen + 1;
  if (c.is_split) {
    const int piece_begin = (pieces.first + piece) * pieces.length;
    if (piece_begin > begin) begin = piece_begin;
    if (piece_begin + pieces.length < end) end = piece_begin + pieces.length;
  }

  // Copies of a half, by 8 lanes a row: warp w has its rows 4 w to 4 w + 3. The blocks of the next
  // two halves are looked up ahead, so that nobody waits for them then.
  const int copied_row = warp * 4 + lane / 8;
  const auto block_of = [&](int half) {
    const int position = begin + half * kColumnHalf + copied_row;
    return position < end ? find_block(p, rows, position) : -1;
  };
  const auto copy_row = [&](const CachePart& part, int32_t from_block, int position, std::byte* to,
                            int num_elements) {
    const bool is_there = from_block >= 0;
    int64_t offset = 0;
    if (is_there)
      offset = head_offset(part, from_block, rows.kv_head) +
               position % static_cast<int>(part.block_size) * part.row_stride;
    const std::byte* from = static_cast<const std::byte*>(part.data) + offset * kSize;
    for (int at = lane % 8 * 16; at < filled_width(num_elements) * kSize; at += 8 * 16) {
      const bool has_piece = is_there && at < num_elements * kSize;
      copy_async(to + at, from + (has_piece ? at : 0), has_piece);
    }
  };
  float key_scales[2] = {};
  float value_scales[2] = {};
  int issue_slot = 0;
  const auto copy_half = [&](int half, int parity, int32_t from_block) {
    const int position = begin + half * kColumnHalf + copied_row;
    std::byte* to = ring + issue_slot * half_bytes;
    if (begin + half / 2 * kUnit < end) {
      copy_row(p.keys, from_block, position, to + copied_row * row_bytes, width);
      if (has_own_values)
        copy_row(p.values, from_block, position,
                 to + kColumnHalf * row_bytes + copied_row * value_row_bytes, value_width);
    }
    if constexpr (kIsF8) {
      key_scales[parity] = find_scale<kStorage>(p, p.keys, rows, from_block, position);
      value_scales[parity] = find_scale<kStorage>(p, p.values, rows, from_block, position);
    }
    commit_copies();
    issue_slot = issue_slot + 1 == c.ring ? 0 : issue_slot + 1;
  };
  // A ring that is no larger than a unit is filled when that has been worked on; a larger one as
  // soon as the unit before has been.
  const bool copies_late = !kIsF8 && c.ring == 2;
  const int num_first = kIsF8 || copies_late ? 2 : c.ring - 2;
  const auto copy_first = [&] {
#pragma unroll
    for (int half = 0; half < kColumnMaxRing - 2; ++half)
      if (half < num_first) copy_half(half, half % 2, block_of(half));
  };
  // What earlier steps wrote need not be waited for; no sequence reads what another one of the same
  // step writes, since prefixes are shared when they are committed.
  const bool is_old = !copies_late && begin + num_first * kColumnHalf <= rows.first_position;
  if (is_old) copy_first();
  wait_for_previous();
  if (!is_old && !copies_late) copy_first();

  // Queries as bf16: to registers by way of what is not yet used otherwise.
  uint16_t* const query = !kHoldsQuery ? own_query
                          : kIsF8 ? widened
                                  : reinterpret_cast<uint16_t*>(ring + (c.ring - 1) * half_bytes);
  const int64_t first_token = p.query_starts[rows.sequence];
  for (int r = warp; r < kRows; r += kColumnWarps) {
    const auto row = static_cast<int>(first_row) + r;
    const bool is_there = row < rows.num_rows;
    const int64_t head = rows.kv_head * rows.group + row % rows.group;
    const float* from =
        p.q + (first_token + row / rows.group) * p.q_token_stride + head * p.q_head_stride;
    for (int column = 2 * lane; column < filled_width(width); column += 64) {
      const uint32_t pair =
          is_there && column < width ? pack_bf16(from[column], from[column + 1]) : 0;
      *reinterpret_cast<uint32_t*>(query + r * stride + column) = pair;
    }
  }
  __syncthreads();
  // A warp's part of a unit's scores: half of the keys' steps of 16 elements, 16 rows and 16 of
  // the positions, or 32 where there are two row tiles.
  constexpr int kPairs = kRowTiles;
  const int part = warp % 2;
  const int score_tile = kRowTiles == 2 ? warp / 2 % 2 : 0;
  const int score_position = kRowTiles == 2 ? warp / 4 * 32 : warp / 2 * 16;
  const int all_steps = filled_width(width) / 16;
  const int half_steps = (all_steps + 1) / 2;
  const int first_step = part * half_steps;
  const int num_steps = part == 0 ? half_steps : all_steps - half_steps;
  const uint16_t* const warp_query =
      query + (score_tile * kTiledRows + matrix % 2 * 8 + lane % 8) * stride + first_step * 16 +
      matrix / 2 * 8;
  uint32_t held[kHoldsQuery ? kSteps : 1][4] = {};
  if constexpr (kHoldsQuery) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if (step < num_steps) load_matrices(held[step], warp_query + step * 16);
    __syncthreads();
  }
  if (copies_late) copy_first();
  int num_issued = num_first;
  int32_t next_blocks[2] = {block_of(num_issued), block_of(num_issued + 1)};
  const auto copy_next = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_half(num_issued, i, next_blocks[i]);
      ++num_issued;
      next_blocks[i] = block_of(num_issued + 1);
    }
  };

  // Of the rows whose weights the thread makes with 15 others: 4 positions each of a unit.
  const int quarter = threadIdx.x % 16;
  const auto row_of = [&](int t) { return t * kTiledRows + static_cast<int>(threadIdx.x) / 16; };
  int sight_first[kRowTiles];
  int sight_last[kRowTiles];
  float span_m[kRowTiles];
  float span_sum[kRowTiles];
  float stretch_m[kRowTiles];
  float stretch_sum[kRowTiles];
  float whole_m[kRowTiles];
  float whole_sum[kRowTiles];
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int64_t row = first_row + row_of(t);
    // Rows beyond the last one see what the first does: nobody asks what they come to.
    sight_last[t] = rows.position(row < rows.num_rows ? row : first_row);
    sight_first[t] = first_seen_from(sight_last[t], p.window);
    span_m[t] = stretch_m[t] = whole_m[t] = -INFINITY;
    span_sum[t] = stretch_sum[t] = whole_sum[t] = 0.0f;
  }
  // Of the warp's columns, fragments of C.
  const int first_column = warp * kColumns;
  float span[kRowTiles][kFragments][4] = {};
  float stretch[kRowTiles][kFragments][4] = {};
  const float scale = p.soft_cap > 0 ? p.scale : p.scale * kLog2E;
  bool is_first_stretch = true;
  int slot = 0;

  for (int unit = begin; unit < end; unit += kUnit) {
    // Its halves, each keys and then values.
    const uint16_t* halves[2];
    wait_for_halves(kIsF8 || copies_late ? 0 : c.ring - 4);
    if constexpr (kIsF8) {
      __syncwarp();     // the warp's rows are there
      __syncthreads();  // nobody reads the unit before any more
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto widen = [&](const std::byte* codes, float factor, uint16_t* to, int count) {
          const uint32_t factors = pack_bf16(factor, factor);
          for (int at = lane % 8 * 4; at < count; at += 8 * 4) {
            const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at);
            auto* pairs = reinterpret_cast<uint32_t*>(to + at);
            pairs[0] = widen_codes((word & 0xffu) << 8 | (word & 0xff00u) << 16, factors);
            pairs[1] = widen_codes((word >> 8 & 0xff00u) | (word & 0xff000000u), factors);
          }
        };
        const std::byte* codes = ring + h * half_bytes;
        uint16_t* to = widened + h * widened_half;
        widen(codes + copied_row * row_bytes, key_scales[h], to + copied_row * stride, width);
        if (has_own_values)
          widen(codes + kColumnHalf * row_bytes + copied_row * value_row_bytes, value_scales[h],
                to + kColumnHalf * stride + copied_row * value_stride, value_width);
        halves[h] = to;
      }
      __syncwarp();  // the warp's codes have been read
      copy_next();
      __syncthreads();
    } else {
      __syncthreads();  // the unit is there, and nobody reads the one before any more
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        halves[h] = reinterpret_cast<const uint16_t*>(ring + slot * half_bytes);
        slot = slot + 1 == c.ring ? 0 : slot + 1;
      }
      if (!copies_late) copy_next();
    }

    {
      float s[2 * kPairs][4] = {};
      const uint16_t* keys = (score_position < kColumnHalf ? halves[0] : halves[1]) +
                             (score_position % kColumnHalf + matrix / 2 * 8 + lane % 8) * stride +
                             first_step * 16 + matrix % 2 * 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= num_steps) break;
        uint32_t a[4];
        if constexpr (kHoldsQuery) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = held[step][i];
        } else {
          load_matrices(a, warp_query + step * 16);
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          uint32_t b[4];
          load_matrices(b, keys + pair * 16 * stride + step * 16);
          multiply_add(s[2 * pair], a, b[0], b[1]);
          multiply_add(s[2 * pair + 1], a, b[2], b[3]);
        }
      }
      float* to = score_parts +
                  (part * kRows + score_tile * kTiledRows + lane / 4) * kColumnScoreStride +
                  score_position + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
        for (int g = 0; g < 2; ++g)
          *reinterpret_cast<float2*>(to + g * 8 * kColumnScoreStride + n * 8) =
              float2{s[n][2 * g], s[n][2 * g + 1]};
      }
    }
    __syncthreads();

#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int row = row_of(t);
      const float* from = score_parts + row * kColumnScoreStride + quarter * 4;
      const float4 low = *reinterpret_cast<const float4*>(from);
      const float4 high = *reinterpret_cast<const float4*>(from + kRows * kColumnScoreStride);
      float s[4] = {low.x + high.x, low.y + high.y, low.z + high.z, low.w + high.w};
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[i] *= scale;
        if (p.soft_cap > 0) s[i] = p.soft_cap * v_tanh(s[i] / p.soft_cap) * kLog2E;
        const int at = unit + quarter * 4 + i;
        if (at < sight_first[t] || at > sight_last[t]) s[i] = -INFINITY;
        largest = fmaxf(largest, s[i]);
      }
      const float m = fmaxf(span_m[t], half_warp_max(largest));
      const float base = finite_or_zero(m);
      const float scale_old = fast_exp2(span_m[t] - base);
      span_m[t] = m;
      const uint32_t pairs[2] = {pack_bf16(fast_exp2(s[0] - base), fast_exp2(s[1] - base)),
                                 pack_bf16(fast_exp2(s[2] - base), fast_exp2(s[3] - base))};
      auto* to = reinterpret_cast<uint32_t*>(weights + row * kColumnWeightStride + quarter * 4);
      float sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[i] = pairs[i];
        sums[i] = bf16_to_float(static_cast<uint16_t>(pairs[i])) +
                  bf16_to_float(static_cast<uint16_t>(pairs[i] >> 16));
      }
      span_sum[t] = v_fma(span_sum[t], scale_old, half_warp_sum(sums[0] + sums[1]));
      if (quarter == 0) unit_scale[row] = scale_old;
    }
    __syncthreads();

    if (first_column < value_width) {
      uint32_t a[kRowTiles][4][4];
      float scales[kRowTiles][2];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const uint16_t* from = weights +
                               (t * kTiledRows + matrix % 2 * 8 + lane % 8) * kColumnWeightStride +
                               matrix / 2 * 8;
#pragma unroll
        for (int step = 0; step < 4; ++step) load_matrices(a[t][step], from + step * 16);
        scales[t][0] = unit_scale[t * kTiledRows + lane / 4];
        scales[t][1] = unit_scale[t * kTiledRows + lane / 4 + 8];
      }
      const int at = (has_own_values ? kColumnHalf * stride : 0) +
                     (matrix % 2 * 8 + lane % 8) * value_stride + first_column + matrix / 2 * 8;
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        if (first_column + n * 16 >= value_width) break;
        float sums[kRowTiles][2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t b[4];
          load_transposed(b, halves[step / 2] + at + step % 2 * 16 * value_stride + n * 16);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            multiply_add(sums[t][0], a[t][step], b[0], b[1]);
            multiply_add(sums[t][1], a[t][step], b[2], b[3]);
          }
        }
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& o = span[t][2 * n + i / 4][i % 4];
            o = v_fma(o, scales[t][i % 4 / 2], sums[t][i / 4][i % 4]);
          }
        }
      }
    }

    const int next = unit + kUnit;
    const bool is_last = next >= end;
    if (is_last || next % kTiledSpan == 0) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const Merge both = merge(stretch_m[t], span_m[t]);
        stretch_m[t] = both.m;
        stretch_sum[t] = merged(both, stretch_sum[t], span_sum[t]);
        span_m[t] = -INFINITY;
        span_sum[t] = 0.0f;
        if (quarter == 0) {
          merge_old[row_of(t)] = both.scale_old;
          merge_new[row_of(t)] = both.scale_new;
        }
      }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int row = t * kTiledRows + lane / 4 + g * 8;
          const Merge both{0.0f, merge_old[row], merge_new[row]};
#pragma unroll
          for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 2 * g; i < 2 * g + 2; ++i) {
              stretch[t][n][i] = merged(both, stretch[t][n][i], span[t][n][i]);
              span[t][n][i] = 0.0f;
            }
          }
        }
      }
    }

    if (is_last || next % kColumnStretch == 0) {
      // What comes of the stretch: a piece that is passed on, or what the output's place has of the
      // stretches so far, of which the last one ends the row.
      const bool is_partial = c.is_split && pieces.count > 1;
      __syncthreads();  // the factors have been read
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const Merge both = merge(whole_m[t], stretch_m[t]);
        whole_m[t] = both.m;
        whole_sum[t] = merged(both, whole_sum[t], stretch_sum[t]);
        const int64_t row = first_row + row_of(t);
        if (quarter == 0 && row < rows.num_rows) {
          merge_old[row_of(t)] = both.scale_old;
          merge_new[row_of(t)] = both.scale_new;
          const Ending ending = is_last && !is_partial
                                    ? end_row(p, rows, row, whole_m[t], whole_sum[t])
                                    : Ending{1.0f, 1.0f};
          kept[row_of(t)] = ending.kept;
          divisor[row_of(t)] = ending.divisor;
          if (is_partial) {
            const int64_t at = piece_index(p, c, rows, row, piece);
            c.maxima[at] = stretch_m[t];
            c.sums[at] = stretch_sum[t];
          }
        }
        stretch_m[t] = -INFINITY;
        stretch_sum[t] = 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int r = t * kTiledRows + lane / 4 + g * 8;
          if (first_row + r >= rows.num_rows) continue;
          float* to = is_partial
                          ? c.outputs + piece_index(p, c, rows, first_row + r, piece) * value_width
                          : output_of(p, rows, first_row + r);
          const Merge both{0.0f, merge_old[r], merge_new[r]};
#pragma unroll
          for (int e = 0; e < 2 * kFragments; ++e) {
            const int column = first_column + e / 2 * 8 + lane % 4 * 2 + e % 2;
            float& value = stretch[t][e / 2][2 * g + e % 2];
            if (column < value_width) {
              const float so_far = is_first_stretch ? value : merged(both, to[column], value);
              to[column] = is_partial || !is_last ? so_far : so_far * kept[r] / divisor[r];
            }
            value = 0.0f;
          }
        }
      }
      is_first_stretch = false;
    }
    if (copies_late && !is_last) {
      __syncthreads();
      copy_next();
    }
  }
}

// blockIdx: (row, KV head, sequence); threads stride over the columns.
__global__ void merge_pieces_kernel(AttentionParams p, ColumnParams c) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int64_t first_row = row / c.tile_rows * c.tile_rows;
  const RowTile rows = find_rows(p, blockIdx.z, blockIdx.y, first_row, c.tile_rows);
  if (row >= rows.num_rows || rows.num_rows > kColumnSplitRows) return;
  const Pieces pieces = find_pieces(p, c, rows);
  if (pieces.count == 1) return;
  float* out = output_of(p, rows, row);
  const int64_t width = p.values.width;
  const int64_t begin = piece_index(p, c, rows, row, 0);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    float m = -INFINITY;
    float sum = 0.0f;
    float value = 0.0f;
    float stretch_m = -INFINITY;
    float stretch_sum = 0.0f;
    float stretch_value = 0.0f;
    for (int piece = 0; piece < pieces.count; ++piece) {
      const int64_t at = begin + piece;
      const Merge in_stretch = merge(stretch_m, c.maxima[at]);
      stretch_m = in_stretch.m;
      stretch_sum = merged(in_stretch, stretch_sum, c.sums[at]);
      stretch_value = merged(in_stretch, stretch_value, c.outputs[at * width + i]);
      const int next = (pieces.first + piece + 1) * pieces.length;
      if (piece + 1 < pieces.count && next % kColumnStretch != 0) continue;
      const Merge both = merge(m, stretch_m);
      m = both.m;
      sum = merged(both, sum, stretch_sum);
      value = merged(both, value, stretch_value);
      stretch_m = -INFINITY;
      stretch_sum = stretch_value = 0.0f;
    }
    const Ending ending = end_row(p, rows, row, m, sum);
    out[i] = value * ending.kept / ending.divisor;
  }
}

template <int kColumns, int kSteps, Storage kStorage>
struct ColumnKernelsOf {
  static constexpr auto one = column_kernel<1, kColumns, kSteps, kStorage>;
  static constexpr auto two = column_kernel<2, kColumns, kSteps, kStorage>;

  static void prepare(int64_t shared_bytes) {
    for (const auto kernel : {one, two}) {
      check("cudaFuncSetAttribute of attention",
            cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)));
    }
  }

  static void run(const AttentionParams& p, const ColumnParams& c, const ColumnShape& shape,
                  int64_t num_rows, cudaStream_t stream) {
    const int row_tiles = c.tile_rows / kTiledRows;
    const auto kv_heads = static_cast<unsigned>(p.keys.num_heads);
    const auto sequences = static_cast<unsigned>(p.num_sequences);
    const auto tiles = static_cast<unsigned>(ceil_div(num_rows, c.tile_rows));
    const dim3 grid(tiles * kv_heads, static_cast<unsigned>(c.slots), sequences);
    launch_early("paged_attention", row_tiles == 2 ? two : one, grid, kColumnThreads,
                 static_cast<size_t>(column_bytes(shape, row_tiles, c.ring)), stream, p, c);
    if (c.slots == 1) return;
    launch_early("paged_attention", merge_pieces_kernel,
                 dim3(static_cast<unsigned>(num_rows), kv_heads, sequences),
                 row_threads(p.values.width), 0, stream, p, c);
  }
};

template <Storage kStorage>
ColumnKernels column_kernels_of(bool is_narrow) {
  const auto of = [](auto kernels) {
    return ColumnKernels{&decltype(kernels)::prepare, &decltype(kernels)::run};
  };
  return is_narrow ? of(ColumnKernelsOf<kNarrowColumns.columns, kNarrowColumns.steps, kStorage>())
                   : of(ColumnKernelsOf<kWideColumns.columns, kWideColumns.steps, kStorage>());
}

}  // namespace
}  // namespace llmserve::cuda
