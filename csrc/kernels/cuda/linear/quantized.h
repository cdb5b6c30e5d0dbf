// Products with weights of integers (quant/linear_format.h): how the weights lie on the device, and
// the kernels' launch functions. Pointers and numbers only, as in kernels.h.
#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear/grouped.h"

namespace llmserve::cuda {

// As ScaleType.
enum class ScaleKind : uint8_t { kF32, kF16, kPowerOfTwo, kBF16, kE4M3 };

// How groups lie among products of 32 elements of K: one to one; one to several, or whole rows; or
// among products of 16 elements, whatever their size.
enum class GroupWidth : uint8_t { kHalf, kOne, kMany };

// What a weight's bits are: integers, indices of a table of integers, or of floats, or E4M3.
// Products with the last two are of bfloat16.
enum class Coding : uint8_t { kIntegers, kTable, kValues, kFp8 };
constexpr bool has_float_products(Coding coding) { return coding >= Coding::kValues; }

// Tiles of 8 rows and units of 128 elements of K are what a warp reads at once: a unit of a tile is
// one piece of memory, the units of a tile follow one another, and so do the tiles. Rows and
// elements beyond the last are zeros.
inline constexpr int kQuantizedTile = 8;
inline constexpr int kQuantizedUnit = 128;
// Warps of a block, each with a part of K.
inline constexpr int kQuantizedParts = 8;

// Lane (g, t) = (lane / 4, lane % 4) has row g of a tile and, of a unit, the elements 32 s + 16 h +
// 4 t + j for s < 4, h < 2, j < 4, which is what its fragments of mma.m16n8k32 take. Word 2 s + h
// has the four of one (s, h), a byte each. As bits are kept apart:
//   8 bits          the words 2 s + h: those below 4 of all lanes, then the others
//   4 bits and more words s, byte j: h = 0 in the low four bits, h = 1 in the upper ones; with a
//                   table, bits 16 h + 4 j instead
//   2, 3, 6 bits    words s / 2: two bits (low ones, or those above four) at 8 j + 4 (s % 2) + 2 h
//   3, 5 bits       one word: the uppermost bit at 8 j + 2 s + h
// Planes of bits follow one another, widest first, each lane after lane. After them come the scales
// of the 8 rows, each row's groups of the unit side by side (a group that lies
// in several units has its scale in each), the minima likewise, zero points of 16 bits, the codes
// of the scales and those of the minima. With codes, a row has one scale, and one minimum, for all
// groups of a unit. Rows of one group have all that after their last unit instead, and rows with a
// scale of their own have that there.
//
// Row by row (`is_plain`), as a library of products reads them: E4M3 [N', K'], N' and K' being N
// and K up to whole tiles and units, and then scales of f32, [N'] or, of groups of 128, [K' / 128,
// N']. In shared memory a unit of a tile is as above, but that word w of lane (g, t) has the
// elements 64 (w / 4) + 16 t + 4 (w % 4) + j.
struct QuantizedLayout {
  bool is_plain = false;
  int bits = 8;
  GroupWidth width = GroupWidth::kMany;
  Coding coding = Coding::kIntegers;
  bool has_min = false;
  bool has_codes = false;
  bool has_zero = false;       // of each group, beside zero_point
  bool has_row_scale = false;  // of each row, an f32
  int zero_point = 0;
  ScaleKind scale = ScaleKind::kF32;
  int group_size = 0;  // the whole row: K
  int num_groups = 1;
  int unit_groups = 1;  // that have a scale in a unit, at most
  int step_units = 1;   // that have whole groups together
  // Bytes from the start of a unit; of rows of one group, from the end of the last unit.
  int scales_begin = 0;
  int mins_begin = 0;
  int zeros_begin = 0;
  int codes_begin = 0;
  int min_codes_begin = 0;
  int row_scales_begin = 0;  // from the end of the last unit
  int unit_bytes = 0;        // a multiple of 16, as all of these
  int num_units = 0;
  int64_t tile_bytes = 0;
  uint32_t table[4] = {};       // 16 bytes; of floats, the lower ones of bfloat16
  uint32_t table_high[4] = {};  // the upper ones
};

// A group of a row of x: its scale, and the sum of its integers.
struct RoundedGroup {
  float scale;
  int32_t sum;
};
// Rows of x [M, K] for such products, `stride` bytes apart, zeros beyond K. As integers, by
// LinearArgs' definition: in each 128 the lanes' elements side by side, byte 32 t + 8 s + 4 h + j;
// groups [M, num_groups]. As bfloat16: the same elements, two bytes each, and no groups.
struct RoundedX {
  std::byte* rows = nullptr;
  int64_t stride = 0;
  RoundedGroup* groups = nullptr;
};
// The same in E4M3, K' bytes a row, zeros beyond K, for groups as the weight's: a value of a group
// is its code times the group's scale, which is the largest magnitude / 448.
struct Fp8X {
  std::byte* rows = nullptr;
  int64_t stride = 0;
  float* scales = nullptr;  // of a row [M], or of 128 [K' / 128, M]
  int64_t num_rows = 0;     // M
};
constexpr int64_t rounded_stride(int64_t in_features, bool is_float) {
  return ceil_div(in_features, kQuantizedUnit) * kQuantizedUnit * (is_float ? 2 : 1);
}
constexpr int64_t rounded_bytes(int64_t rows, const QuantizedLayout& layout) {
  const bool is_float = has_float_products(layout.coding);
  const int64_t groups = is_float ? 0 : layout.num_groups;
  return rows * (rounded_stride(int64_t{layout.num_units} * kQuantizedUnit, is_float) +
                 groups * static_cast<int64_t>(sizeof(RoundedGroup)));
}
struct RoundParams {
  ConstRows x;
  int64_t num_rows;         // M
  int64_t width;            // K
  const int32_t* order;     // [K] or null: column k is x's column order[k]
  float outlier_threshold;  // finite elements of that magnitude and more count as 0; 0: none
  RoundedX to;
  Fp8X to_fp8{};          // in its place, if it has rows
  bool is_plain = false;  // the weight's layout, as round_rows sets it
  // What is rounded in place of x, with neither of the two above: its norm, or what a gate makes of
  // rows [2 K]. Both have the bits of rms_norm and activation.
  const float* norm_weight = nullptr;  // [K], or no norm
  NormNumbers norm{};
  int norm_threads = 0;  // rms_threads(K)
  bool is_gated = false;
  Activation activation = Activation::kSilu;
};
void round_rows(const RoundParams& params, const QuantizedLayout& layout, cudaStream_t stream);

struct QuantizedParams {
  RoundedX x;
  const std::byte* weight = nullptr;
  QuantizedLayout layout;
  const float* bias = nullptr;  // [N] or null
  Rows out{};
  int64_t num_rows = 0;      // M, of out
  int64_t rows_at_once = 8;  // quantized_rows_at_once(M), or as the tasks have been made
  int64_t out_features = 0;  // N
  int64_t in_features = 0;   // K
  bool accumulate = false;
  // Of rows with weights of their own: in place of `weight`, and bias is [X, N] or null.
  RowGroups groups{};
};
// Rows of x that a block of a product takes, of so many that there are.
constexpr int64_t quantized_rows_at_once(int64_t rows) { return rows <= 8 ? 8 : 32; }
// The same of R rows of X weights.
constexpr int64_t grouped_rows_at_once(int64_t rows, int64_t weights) {
  return quantized_rows_at_once(ceil_div(rows, std::max<int64_t>(1, std::min(rows, weights))));
}
// Of the codes of a weight that lies row by row.
constexpr int64_t plain_codes_bytes(const QuantizedLayout& layout, int64_t out_features) {
  return ceil_div(out_features, kQuantizedTile) * kQuantizedTile * layout.num_units *
         kQuantizedUnit;
}
// out = raw * x_scales * weight_scales (+ bias) (+ out): what a product of E4M3 leaves to do where
// the library does not scale it. Without scales only the bias is added; raw may be out.
struct Fp8FinishParams {
  ConstRows raw;
  const float* x_scales = nullptr;       // [M]
  const float* weight_scales = nullptr;  // [N]
  const float* bias = nullptr;           // [N] or null
  Rows out{};
  int64_t num_rows = 0;
  int64_t out_features = 0;
  bool accumulate = false;
};
void finish_fp8(const Fp8FinishParams& params, cudaStream_t stream);

// LinearArgs' definition for integers, but for the order of sums: K is cut into kQuantizedParts
// parts, by groups, each part's groups are added in order, from 0, and then the parts. The same for
// every M; rows of one group have the bits of every other backend.
void quantized_linear(const QuantizedParams& params, cudaStream_t stream);
// Adds what round_rows left out: rows of one group of 8 bits, after their product.
void add_outliers(const RoundParams& rows, const QuantizedParams& product, cudaStream_t stream);
// Whether there is a kernel for weights of this layout.
bool has_quantized_kernel(const QuantizedLayout& layout);
// Once for each layout before its first product, on the device, and not within a capture.
void prepare_quantized_linear(const QuantizedLayout& layout);

}  // namespace llmserve::cuda
