// Products with weights of integers (quant/linear_format.h): how the weights lie on the device, and
// the kernels' launch functions. Pointers and numbers only, as in kernels.h.
#pragma once

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

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
// of the 8 rows, each row's groups of the unit side by side (or, of a group of several units, its
// scale again in each), the minima likewise, the codes of the scales and those of the minima. With
// codes, a row has one scale, and one minimum, for all groups of a unit. Rows of one group have the
// scales, and the minima, after their last unit instead.
// How groups lie among products of 32 elements of K: two to one (groups of 16), one to one, or one
// to many.
enum class GroupWidth : uint8_t { kHalf, kOne, kMany };

struct QuantizedLayout {
  int bits = 8;
  GroupWidth width = GroupWidth::kMany;
  bool is_table = false;
  bool has_min = false;
  bool has_codes = false;
  int zero_point = 0;
  int scale_bytes = 4;  // 4: f32; 2: f16; 1: the exponent of a power of two
  int group_size = 0;   // the whole row: K
  int num_groups = 1;
  int unit_groups = 1;  // that have a scale in a unit
  // Bytes from the start of a unit; of rows of one group, from the end of the last unit.
  int scales_begin = 0;
  int mins_begin = 0;
  int codes_begin = 0;
  int min_codes_begin = 0;
  int unit_bytes = 0;  // a multiple of 16, as all of these
  int num_units = 0;
  int64_t tile_bytes = 0;
  uint32_t table[4] = {};  // 16 bytes
};

// A group of a row of x: its scale, and the sum of its integers.
struct RoundedGroup {
  float scale;
  int32_t sum;
};
// Rows of x as integers, by LinearArgs' definition: q [M, stride = rounded_stride(K)], in each 128
// the lanes' elements side by side (32 t + 8 s + 4 h + j), zeros beyond K; groups [M, num_groups].
struct RoundedX {
  int8_t* q = nullptr;
  int64_t stride = 0;
  RoundedGroup* groups = nullptr;
};
constexpr int64_t rounded_stride(int64_t in_features) {
  return ceil_div(in_features, kQuantizedUnit) * kQuantizedUnit;
}
constexpr int64_t rounded_bytes(int64_t rows, int64_t in_features, int64_t num_groups) {
  return rows *
         (rounded_stride(in_features) + num_groups * static_cast<int64_t>(sizeof(RoundedGroup)));
}
void round_to_integers(ConstRows x, int64_t num_rows, int64_t width, int64_t group_size,
                       const RoundedX& to, cudaStream_t stream);

struct QuantizedParams {
  RoundedX x;
  const std::byte* weight = nullptr;
  QuantizedLayout layout;
  const float* bias = nullptr;  // [N] or null
  Rows out{};
  int64_t num_rows = 0;      // M
  int64_t out_features = 0;  // N
  int64_t in_features = 0;   // K
  bool accumulate = false;
};
// LinearArgs' definition for integers, but for the order of sums: K is cut into kQuantizedParts
// parts, by groups, each part's groups are added in order, from 0, and then the parts. The same for
// every M; rows of one group have the bits of every other backend.
void quantized_linear(const QuantizedParams& params, cudaStream_t stream);
// Whether there is a kernel for weights of this layout.
bool has_quantized_kernel(const QuantizedLayout& layout);
// Once for each layout before its first product, on the device, and not within a capture.
void prepare_quantized_linear(const QuantizedLayout& layout);

}  // namespace llmserve::cuda
