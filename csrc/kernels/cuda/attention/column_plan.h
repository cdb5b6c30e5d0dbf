// Launch parameters of attention by columns (column_attention.cuh) as functions of shapes: plain
// C++, tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {

// Eight warps share the scores of a row tile, of 16 or 32 rows, and each has an eighth of the
// values' columns: 64 of 512, whose sums are 32 registers a lane and row tile of 16.
inline constexpr int kColumnWarps = 8;
inline constexpr int kColumnThreads = kColumnWarps * 32;
// Positions that are copied together: half a unit, 37 KB of rows of 576 in bf16.
inline constexpr int kColumnHalf = 32;
// Spans are merged in stretches, and these one after another: what a stretch of DeepSeek-V3's 128
// heads passes on is 6% of the 4.7 MB that it reads, what a span does is as much as it reads.
inline constexpr int kColumnStretch = 4096;
static_assert(kColumnStretch % kTiledSpan == 0 && kTiledSpan % kTiledUnit == 0);
// Sequences of more rows have blocks enough without a split: a chunk of 65 tokens of 16 heads.
// Eight tokens of 128 heads, as a step with guesses has them, are split.
inline constexpr int64_t kColumnSplitRows = 1024;
// Stretches are not split into spans where there are blocks for a large GPU (132 SMs) without.
inline constexpr int64_t kColumnEnoughBlocks = 132;
inline constexpr int kColumnMaxRing = 6;
// From row to row: scores of a unit in floats, weights in bf16. No two of the rows that a warp
// reads or writes at once begin in the same bank.
inline constexpr int kColumnScoreStride = kTiledUnit + 8;
inline constexpr int kColumnWeightStride = kTiledUnit + 8;
// Floats of a row that its threads tell those that have its columns.
inline constexpr int kColumnNumbers = 9;

// Which kernels: those of few columns take values of up to 256 and keys of up to 320 elements.
struct ColumnClass {
  int columns;  // of the values, a warp
  int steps;    // of 16 elements of a key, in half of it, at most
};
inline constexpr ColumnClass kNarrowColumns{32, 10};
inline constexpr ColumnClass kWideColumns{64, 18};

constexpr bool column_class_fits(const ColumnClass& kind, int64_t key_width, int64_t value_width) {
  return key_width > 0 && value_width > 0 && key_width <= int64_t{32} * kind.steps &&
         value_width <= kColumnWarps * kind.columns;
}
// From row to row in shared memory, of rows that are filled up to a step of 16 elements.
constexpr int column_stride(int64_t width) {
  return tiled_stride(static_cast<int>(ceil_div(width, 16)) * 16);
}

struct ColumnShape {
  int key_width = 0;
  int value_width = 0;
  bool has_values_in_keys = false;
  bool is_f8 = false;

  constexpr int own_value_width() const { return has_values_in_keys ? 0 : value_width; }
  // Elements of keys and values of a position where they lie as bf16.
  constexpr int64_t row_elements() const {
    return column_stride(key_width) + (has_values_in_keys ? 0 : column_stride(value_width));
  }
  // Half a unit as it is copied: bf16, or codes.
  constexpr int64_t half_bytes() const {
    return kColumnHalf * (is_f8 ? int64_t{key_width} + own_value_width() : row_elements() * 2);
  }
};

// Shared memory of a block: queries (those of 16 rows are in registers), a unit as bf16 of what
// is widened, the ring of halves, both parts of the scores, weights, numbers of rows.
constexpr int64_t column_bytes(const ColumnShape& shape, int row_tiles, int ring) {
  const int64_t rows = int64_t{kTiledRows} * row_tiles;
  const int64_t query = row_tiles > 1 ? rows * column_stride(shape.key_width) * 2 : 0;
  const int64_t widened = shape.is_f8 ? kTiledUnit * shape.row_elements() * 2 : 0;
  return query + widened + ring * shape.half_bytes() +
         rows *
             (int64_t{2} * kColumnScoreStride * 4 + kColumnWeightStride * 2 + kColumnNumbers * 4);
}

// How a block works: row tiles of 16 rows, and halves of units in its ring. Two halves are a unit,
// beside which nothing is on its way but codes, which are widened before the next come.
struct ColumnForm {
  int row_tiles = 1;
  int ring = 0;  // 0: a block's shared memory has no room
};
constexpr ColumnForm column_form(const ColumnShape& shape, int64_t rows, int64_t shared_bytes) {
  // Two row tiles read the cache half as often; not at the price of copying nothing ahead.
  const int least = shape.is_f8 ? 2 : 4;
  if (rows > kTiledRows && column_bytes(shape, 2, least) <= shared_bytes) {
    int ring = least;
    while (!shape.is_f8 && ring < kColumnMaxRing &&
           column_bytes(shape, 2, ring + 1) <= shared_bytes)
      ++ring;
    return {2, ring};
  }
  for (int ring = shape.is_f8 ? 2 : kColumnMaxRing; ring >= 2; --ring) {
    if (ring != 3 && column_bytes(shape, 1, ring) <= shared_bytes) return {1, ring};
  }
  return {};
}

// Rows are copied by 16 bytes.
constexpr bool columns_fit(const ColumnShape& shape, int64_t shared_bytes) {
  const int multiple = shape.is_f8 ? 16 : 8;
  return shape.key_width % multiple == 0 && shape.value_width % multiple == 0 &&
         column_class_fits(kWideColumns, shape.key_width, shape.value_width) &&
         column_form(shape, 1, shared_bytes).ring > 0;
}

// What split sequences pass on.
struct ColumnPlan {
  int64_t split_rows = 0;  // of a KV head and sequence, at most
  int64_t long_rows = 0;   // likewise of those that are not split
  int64_t context = 0;     // of a split sequence

  constexpr void add(int64_t rows, int64_t kv_len) {
    if (rows > kColumnSplitRows) {
      long_rows = std::max(long_rows, rows);
    } else if (rows > 0) {
      split_rows = std::max(split_rows, rows);
      context = std::max(context, kv_len);
    }
  }
  constexpr int64_t slot_bytes(int64_t kv_heads, int64_t width) const {
    return kv_heads * split_rows * (width + 2) * 4;
  }
  // Sequences that are split together: what a stretch each passes on is bounded, as in TiledPlan.
  constexpr int64_t at_once(int64_t sequences, int64_t kv_heads, int64_t width) const {
    const int64_t bytes =
        slot_bytes(kv_heads, width) * ceil_div(std::max<int64_t>(context, 1), kColumnStretch);
    return std::clamp<int64_t>(kMaxPartialBytes / std::max<int64_t>(bytes, 1), 1,
                               std::max<int64_t>(sequences, 1));
  }
  // Pieces of each that there is room for: of the longest one as stretches at least.
  constexpr int64_t slots(int64_t sequences, int64_t kv_heads, int64_t width) const {
    const int64_t bytes = slot_bytes(kv_heads, width) * at_once(sequences, kv_heads, width);
    const int64_t stretches = ceil_div(context, kColumnStretch);
    return std::clamp(kMaxPartialBytes / std::max<int64_t>(bytes, 1), stretches,
                      std::max(ceil_div(context, kTiledSpan), stretches));
  }
  // Working memory of sequences that are split together.
  constexpr int64_t bytes(int64_t sequences, int64_t kv_heads, int64_t width) const {
    const int64_t pieces = slots(sequences, kv_heads, width);
    return pieces <= 1 ? 0
                       : at_once(sequences, kv_heads, width) * pieces * slot_bytes(kv_heads, width);
  }
};

// The bytes() of any step, at most: of so many sequences, whose longest context is this.
constexpr int64_t max_column_bytes(int64_t sequences, int64_t context, int64_t kv_heads,
                                   int64_t width) {
  const ColumnPlan plan{.split_rows = kColumnSplitRows, .context = context};
  const int64_t stretch = plan.slot_bytes(kv_heads, width) * ceil_div(context, kColumnStretch);
  const int64_t spans = plan.slot_bytes(kv_heads, width) * ceil_div(context, kTiledSpan);
  return std::min(sequences * spans, std::max(kMaxPartialBytes, stretch));
}

}  // namespace llmserve::cuda
