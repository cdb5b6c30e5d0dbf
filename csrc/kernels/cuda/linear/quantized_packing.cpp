#include "kernels/cuda/linear/quantized_packing.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/float_types.h"

namespace llmserve::cuda {
namespace {

constexpr int kTile = kQuantizedTile;
constexpr int kUnit = kQuantizedUnit;
constexpr int kLanes = 32;

int aligned(int64_t bytes) { return static_cast<int>(ceil_div(bytes, 16) * 16); }

void write_scale(const LinearFormat& format, float scale, std::byte* to) {
  uint16_t half = 0;
  switch (format.scale_type) {
    case ScaleType::kF32:
      std::memcpy(to, &scale, sizeof scale);
      return;
    case ScaleType::kF16:
      half = f32_to_f16(scale);
      break;
    case ScaleType::kBF16:
      half = f32_to_bf16(scale);
      break;
    case ScaleType::kPowerOfTwo:
      *to = static_cast<std::byte>(std::bit_cast<uint32_t>(scale) >> 23);
      return;
    case ScaleType::kE4M3:
      *to = static_cast<std::byte>(f32_to_fp8(scale));
      return;
  }
  std::memcpy(to, &half, sizeof half);
}

}  // namespace

QuantizedLayout quantized_layout(const LinearFormat& format, int64_t in_features) {
  QuantizedLayout layout{.bits = format.bits,
                         .width = format.group_size % 32 != 0 ? GroupWidth::kHalf
                                  : format.group_size == 32   ? GroupWidth::kOne
                                                              : GroupWidth::kMany,
                         .coding = format.table    ? Coding::kTable
                                   : format.values ? Coding::kValues
                                   : format.is_fp8 ? Coding::kFp8
                                                   : Coding::kIntegers,
                         .has_min = format.has_min,
                         .has_codes = format.has_scale_codes(),
                         .has_zero = format.has_zero,
                         .has_row_scale = format.has_row_scale,
                         .zero_point = format.zero_point(),
                         .scale = static_cast<ScaleKind>(format.scale_type),
                         .group_size = static_cast<int>(format.group_elements(in_features)),
                         .num_groups = static_cast<int>(format.num_groups(in_features)),
                         .num_units = static_cast<int>(ceil_div(in_features, kUnit))};
  // Scales of all types are f32 exactly.
  layout.is_plain = format.is_fp8 && !format.has_row_scale &&
                    (format.group_size == kUnit || layout.num_groups == 1);
  if (layout.is_plain) layout.scale = ScaleKind::kF32;
  if (format.table) std::memcpy(layout.table, format.table, sizeof layout.table);
  for (size_t i = 0; format.values && i < 16; ++i) {
    const uint32_t bits = f32_to_bf16(format.values[i]);
    layout.table[i / 4] |= (bits & 0xffu) << i % 4 * 8;
    layout.table_high[i / 4] |= (bits >> 8) << i % 4 * 8;
  }
  const bool is_whole = layout.num_groups == 1;
  if (!is_whole) {
    layout.step_units = layout.group_size / std::gcd(layout.group_size, kUnit);
    const bool is_split = kUnit % layout.group_size != 0 && layout.group_size % kUnit != 0;
    layout.unit_groups = std::max(1, kUnit / layout.group_size) + (is_split ? 2 : 0);
  }
  int at = is_whole ? 0 : kTile * kUnit * layout.bits / 8;
  const auto place = [&](int entries, int each) {
    const int begin = at;
    at += aligned(kTile * entries * each);
    return begin;
  };
  const int num_scales = layout.has_codes ? 1 : layout.unit_groups;
  const int each =
      static_cast<int>(layout.is_plain ? sizeof(float) : scale_bytes(format.scale_type));
  layout.scales_begin = place(num_scales, each);
  if (layout.has_min) layout.mins_begin = place(num_scales, each);
  if (layout.has_zero) layout.zeros_begin = place(layout.unit_groups, 2);
  if (layout.has_codes) layout.codes_begin = place(layout.unit_groups, 1);
  if (layout.has_codes && layout.has_min) layout.min_codes_begin = place(layout.unit_groups, 1);
  layout.unit_bytes = is_whole ? kTile * kUnit * layout.bits / 8 : at;
  if (!is_whole) at = 0;
  if (layout.has_row_scale) layout.row_scales_begin = place(1, 4);
  layout.tile_bytes = int64_t{layout.num_units} * layout.unit_bytes + at;
  return layout;
}

TileRows::TileRows(const LinearFormat& format, int64_t in_features)
    : format_(format),
      in_features_(in_features),
      layout_(quantized_layout(format, in_features)),
      values_(static_cast<size_t>(int64_t{kTile} * layout_.num_units * kUnit)),
      scales_(static_cast<size_t>(kTile * format.num_scales(in_features))),
      mins_(scales_.size()),
      scale_codes_(static_cast<size_t>(kTile * format.num_codes(in_features))),
      min_codes_(scale_codes_.size()),
      zeros_(static_cast<size_t>(kTile * format.num_zeros(in_features))),
      row_scales_(kTile) {}

QuantizedRow TileRows::row(int64_t i) {
  const int64_t scales = format_.num_scales(in_features_);
  const int64_t codes = format_.num_codes(in_features_);
  return {.values = values_.data() + i * layout_.num_units * kUnit,
          .scales = scales_.data() + i * scales,
          .mins = mins_.data() + i * scales,
          .scale_codes = scale_codes_.data() + i * codes,
          .min_codes = min_codes_.data() + i * codes,
          .zeros = zeros_.data() + i * format_.num_zeros(in_features_),
          .row_scale = row_scales_.data() + i};
}

void TileRows::clear(int64_t i) {
  const QuantizedRow of = row(i);
  std::fill_n(of.values, in_features_, int8_t{0});
  std::fill_n(of.scales, format_.num_scales(in_features_), 0.0f);
  std::fill_n(of.mins, format_.num_scales(in_features_), 0.0f);
  std::fill_n(of.scale_codes, format_.num_codes(in_features_), int8_t{0});
  std::fill_n(of.min_codes, format_.num_codes(in_features_), int8_t{0});
  std::fill_n(of.zeros, format_.num_zeros(in_features_), int16_t{0});
  *of.row_scale = 0.0f;
}

void TileRows::pack(std::byte* to) const {
  std::memset(to, 0, static_cast<size_t>(layout_.tile_bytes));
  for (int64_t u = 0; u < layout_.num_units; ++u) pack_unit(u, to + u * layout_.unit_bytes);
  std::byte* tail = to + int64_t{layout_.num_units} * layout_.unit_bytes;
  if (layout_.num_groups == 1) pack_scales(0, tail);
  if (layout_.has_row_scale)
    std::memcpy(tail + layout_.row_scales_begin, row_scales_.data(), kTile * sizeof(float));
}

void TileRows::pack_plain(std::byte* codes, float* scales, int64_t rows) const {
  std::memcpy(codes, values_.data(), values_.size());
  for (int64_t r = 0; r < kTile; ++r)
    for (int64_t g = 0; g < layout_.num_groups; ++g)
      scales[g * rows + r] = scales_[static_cast<size_t>(r * layout_.num_groups + g)];
}

void TileRows::pack_unit(int64_t unit, std::byte* to) const {
  for (int lane = 0; lane < kLanes; ++lane)
    pack_integers(values_.data() + (lane / 4 * int64_t{layout_.num_units} + unit) * kUnit, lane,
                  to);
  if (layout_.num_groups > 1) pack_scales(unit * kUnit / layout_.group_size, to);
}

// A lane's words of a unit.
void TileRows::pack_integers(const int8_t* values, int lane, std::byte* unit) const {
  const int bits = layout_.bits;
  uint32_t eights[8] = {};
  uint32_t fours[4] = {};
  uint32_t twos[2] = {};
  uint32_t ones = 0;
  for (int i = 0; i < 32; ++i) {
    const int s = i / 8;
    const int h = i / 4 % 2;
    const int j = i % 4;
    const uint32_t value = static_cast<uint8_t>(values[32 * s + 16 * h + lane % 4 * 4 + j]);
    eights[i / 4] |= value << 8 * j;
    fours[s] |=
        (value & 0xfu) << (layout_.coding == Coding::kTable || layout_.coding == Coding::kValues
                               ? 16 * h + 4 * j
                               : 8 * j + 4 * h);
    twos[s / 2] |= (value >> (bits == 6 ? 4 : 0) & 3u) << (8 * j + 4 * (s % 2) + 2 * h);
    ones |= (value >> (bits - 1) & 1u) << (8 * j + 2 * s + h);
  }
  std::byte* plane = unit;
  const auto write = [&](const uint32_t* words, int num_bytes) {
    std::memcpy(plane + lane * num_bytes, words, static_cast<size_t>(num_bytes));
    plane += kLanes * num_bytes;
  };
  if (bits == 8) {
    write(eights, 16);
    write(eights + 4, 16);
    return;
  }
  if (bits >= 4) write(fours, 16);
  if (bits == 2 || bits == 3 || bits == 6) write(twos, 8);
  if (bits == 3 || bits == 5) write(&ones, 4);
}

// Those of a unit, which begins in group `first_group`; groups beyond the last have none.
void TileRows::pack_scales(int64_t first_group, std::byte* unit) const {
  const int64_t num_scales = format_.num_scales(in_features_);
  const int64_t num_codes = format_.num_codes(in_features_);
  for (int64_t r = 0; r < kTile; ++r) {
    for (int64_t e = 0; e < layout_.unit_groups; ++e) {
      const int64_t group = first_group + e;
      if (group >= layout_.num_groups) continue;
      const auto shared = static_cast<size_t>(r * num_scales + (group >> format_.scale_shift));
      const int64_t at = r * layout_.unit_groups + e;
      const int64_t scale_at = (layout_.has_codes ? r : at) * scale_bytes(format_.scale_type);
      write_scale(format_, scales_[shared], unit + layout_.scales_begin + scale_at);
      if (layout_.has_min)
        write_scale(format_, mins_[shared], unit + layout_.mins_begin + scale_at);
      if (layout_.has_zero)
        std::memcpy(unit + layout_.zeros_begin + at * 2,
                    &zeros_[static_cast<size_t>(r * format_.num_zeros(in_features_) + group)], 2);
      if (!layout_.has_codes) continue;
      const auto code = static_cast<size_t>(r * num_codes + group);
      unit[layout_.codes_begin + at] = static_cast<std::byte>(scale_codes_[code]);
      if (layout_.has_min)
        unit[layout_.min_codes_begin + at] = static_cast<std::byte>(min_codes_[code]);
    }
  }
}

}  // namespace llmserve::cuda
