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

#include "kernels/cuda/attention/column_parts.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kNever = 0x7fffffff;

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

// blockIdx (KV head of a row tile from the last to the first, piece, sequence).
template <int kRowTiles, int kColumns, int kSteps, Storage kStorage>
__global__ void __launch_bounds__(kColumnThreads, 1)
    column_kernel(AttentionParams p, ColumnParams c) {
  using Shared = ColumnShared<kRowTiles, kStorage>;
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  const Shared at(p, c, shared);
  const auto kv_heads = static_cast<int>(p.keys.num_heads);
  const auto block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int64_t first_row = int64_t{block / kv_heads} * Shared::kRows;
  const RowTile rows = find_rows(p, blockIdx.z, block % kv_heads, first_row, Shared::kRows);
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

  HalfCopies<kRowTiles, kStorage> copies(p, rows, at, begin, end);
  const bool copies_late = at.copies_late();
  // What earlier steps wrote need not be waited for; no sequence reads what another one of the same
  // step writes, since prefixes are shared when they are committed.
  const bool is_old = !copies_late && begin + copies.first_positions() <= rows.first_position;
  if (is_old) copies.first();
  wait_for_previous();
  if (!is_old && !copies_late) copies.first();
  // Queries go to registers by way of what is not yet used otherwise.
  uint16_t* const query =
      !Shared::kHoldsQuery ? at.query
      : Shared::kIsF8 ? at.widened
                      : reinterpret_cast<uint16_t*>(at.ring + (at.ring_size - 1) * at.half_bytes);
  using Scores = UnitScores<kRowTiles, kSteps, kStorage>;
  Scores::load(p, rows, at, query);
  __syncthreads();
  const Scores scores(at, query);
  if constexpr (Shared::kHoldsQuery) __syncthreads();
  if (copies_late) copies.first();
  copies.look_ahead();

  RowWeights<kRowTiles, kStorage> weights(p, rows, at);
  ColumnSums<kRowTiles, kColumns, kStorage> sums;
  const bool is_partial = pieces.count > 1;
  const auto index_of = [&](int64_t row) { return piece_index(p, c, rows, row, piece); };
  const auto place_of = [&](int64_t row) {
    return is_partial ? c.outputs + index_of(row) * at.value_width : output_of(p, rows, row);
  };
  bool is_first = true;  // of the stretches
  int slot = 0;
  for (int unit = begin; unit < end; unit += kUnit) {
    const uint16_t* halves[2];
    copies.wait();
    if constexpr (Shared::kIsF8) {
      __syncwarp();     // the warp's rows are there
      __syncthreads();  // nobody reads the unit before any more
      copies.widen();
      __syncwarp();  // the warp's codes have been read
      copies.next();
      __syncthreads();
      halves[0] = at.widened;
      halves[1] = at.widened + at.widened_half();
    } else {
      __syncthreads();  // the unit is there, and nobody reads the one before any more
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        halves[h] = reinterpret_cast<const uint16_t*>(at.ring + slot * at.half_bytes);
        slot = slot + 1 == at.ring_size ? 0 : slot + 1;
      }
      if (!copies_late) copies.next();
    }
    scores.make(at, halves);
    __syncthreads();
    weights.weigh(p, at, unit);
    __syncthreads();
    sums.add_unit(at, halves);

    const int next = unit + kUnit;
    const bool is_last = next >= end;
    if (is_last || next % kTiledSpan == 0) {
      weights.end_span(at);
      __syncthreads();
      sums.end_span(at);
    }
    if (is_last || next % kColumnStretch == 0) {
      __syncthreads();  // the factors of the span have been read
      weights.end_stretch(at);
      if (is_partial)
        weights.pass_on(c, rows, at, index_of);
      else if (is_last)
        weights.end_rows(p, rows, at);
      __syncthreads();
      sums.end_stretch(rows, at, is_first, is_last && !is_partial, place_of);
      is_first = false;
    }
    if (copies_late && !is_last) {
      __syncthreads();
      copies.next();
    }
  }
}

// blockIdx: (row, KV head, sequence); threads stride over the columns.
__global__ void merge_pieces_kernel(AttentionParams p, ColumnParams c) {
  constexpr int kTogether = 8;  // pieces that are asked for before any is there
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
    for (int first = 0; first < pieces.count; first += kTogether) {
      float piece_m[kTogether] = {};
      float piece_sum[kTogether] = {};
      float piece_value[kTogether] = {};
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= pieces.count) break;
        const int64_t at = begin + first + j;
        piece_m[j] = c.maxima[at];
        piece_sum[j] = c.sums[at];
        piece_value[j] = c.outputs[at * width + i];
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int piece = first + j;
        if (piece >= pieces.count) break;
        const Merge in_stretch = merge(stretch_m, piece_m[j]);
        stretch_m = in_stretch.m;
        stretch_sum = merged(in_stretch, stretch_sum, piece_sum[j]);
        stretch_value = merged(in_stretch, stretch_value, piece_value[j]);
        const int next = (pieces.first + piece + 1) * pieces.length;
        if (piece + 1 < pieces.count && next % kColumnStretch != 0) continue;
        const Merge both = merge(m, stretch_m);
        m = both.m;
        sum = merged(both, sum, stretch_sum);
        value = merged(both, value, stretch_value);
        stretch_m = -INFINITY;
        stretch_sum = stretch_value = 0.0f;
      }
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
