// Packing of weights of integers into what quantized.h describes, on the host.
#pragma once

#include <vector>

#include "kernels/cuda/linear/quantized.h"
#include "quant/linear_format.h"

namespace llmserve::cuda {

QuantizedLayout quantized_layout(const LinearFormat& format, int64_t in_features);

// Rows of a tile before they are packed, and their packing.
class TileRows {
 public:
  TileRows(const LinearFormat& format, int64_t in_features);

  // Row i < 8, to be filled.
  QuantizedRow row(int64_t i);
  void clear(int64_t i);
  // tile_bytes of the layout.
  void pack(std::byte* to) const;
  // Of a plain layout: the codes of the 8 rows, and their scales, those of a group `rows` floats
  // after those of the group before.
  void pack_plain(std::byte* codes, float* scales, int64_t rows) const;

 private:
  void pack_unit(int64_t unit, std::byte* to) const;
  void pack_integers(const int8_t* values, int lane, std::byte* unit) const;
  void pack_scales(int64_t first_group, std::byte* unit) const;

  const LinearFormat& format_;
  const int64_t in_features_;
  const QuantizedLayout layout_;
  std::vector<int8_t> values_;  // [8, round_up(K, 128)]
  std::vector<float> scales_;   // [8, num_scales]
  std::vector<float> mins_;
  std::vector<int8_t> scale_codes_;  // [8, num_codes]
  std::vector<int8_t> min_codes_;
  std::vector<int16_t> zeros_;     // [8, num_zeros]
  std::vector<float> row_scales_;  // [8]
};

}  // namespace llmserve::cuda
