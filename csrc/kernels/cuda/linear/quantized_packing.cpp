#include "kernels/cuda/linear/quantized_packing.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/float_types.h"

namespace llmserve::cuda {
namespace {

constexpr int kTile = kQuantizedTile;
constexpr int kUnit = kQuantizedUnit;
constexpr int kLanes = 32;

int aligned(int64_t bytes) { return static_cast<int>(ceil_div(bytes, 16) * 16); }

void write_scale(float scale, int num_bytes, std::byte* to) {
  if (num_bytes == 4) {
    std::memcpy(to, &scale, 4);
  } else if (num_bytes == 2) {
    const uint16_t half = f32_to_f16(scale);
    std::memcpy(to, &half, 2);
  } else {
    *to = static_cast<std::byte>(std::bit_cast<uint32_t>(scale) >> 23);
  }
}

}  // namespace

QuantizedLayout quantized_layout(const LinearFormat& format, int64_t in_features) {
  QuantizedLayout layout{.bits = format.bits,
                         .width = format.group_size == 16   ? GroupWidth::kHalf
                                  : format.group_size == 32 ? GroupWidth::kOne
                                                            : GroupWidth::kMany,
                         .is_table = format.table != nullptr,
                         .has_min = format.has_min,
                         .has_codes = format.has_scale_codes(),
                         .zero_point = format.zero_point(),
                         .scale_bytes = static_cast<int>(scale_bytes(format.scale_type)),
                         .group_size = static_cast<int>(format.group_elements(in_features)),
                         .num_groups = static_cast<int>(format.num_groups(in_features)),
                         .num_units = static_cast<int>(ceil_div(in_features, kUnit))};
  if (format.table) std::memcpy(layout.table, format.table, sizeof layout.table);
  const bool is_whole = layout.num_groups == 1;
  layout.unit_groups = is_whole ? 1 : std::max(1, kUnit / layout.group_size);
  int at = is_whole ? 0 : kTile * kUnit * layout.bits / 8;
  const auto place = [&](int entries, int each) {
    const int begin = at;
    at += aligned(kTile * entries * each);
    return begin;
  };
  const int num_scales = layout.has_codes ? 1 : layout.unit_groups;
  layout.scales_begin = place(num_scales, layout.scale_bytes);
  if (layout.has_min) layout.mins_begin = place(num_scales, layout.scale_bytes);
  if (layout.has_codes) layout.codes_begin = place(layout.unit_groups, 1);
  if (layout.has_codes && layout.has_min) layout.min_codes_begin = place(layout.unit_groups, 1);
  layout.unit_bytes = is_whole ? kTile * kUnit * layout.bits / 8 : at;
  layout.tile_bytes = int64_t{layout.num_units} * layout.unit_bytes + (is_whole ? at : 0);
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
      min_codes_(scale_codes_.size()) {}

QuantizedRow TileRows::row(int64_t i) {
  const int64_t scales = format_.num_scales(in_features_);
  const int64_t codes = format_.num_codes(in_features_);
  return {.values = values_.data() + i * layout_.num_units * kUnit,
          .scales = scales_.data() + i * scales,
          .mins = mins_.data() + i * scales,
          .scale_codes = scale_codes_.data() + i * codes,
          .min_codes = min_codes_.data() + i * codes};
}

void TileRows::clear(int64_t i) {
  const QuantizedRow of = row(i);
  std::fill_n(of.values, in_features_, int8_t{0});
  std::fill_n(of.scales, format_.num_scales(in_features_), 0.0f);
  std::fill_n(of.mins, format_.num_scales(in_features_), 0.0f);
  std::fill_n(of.scale_codes, format_.num_codes(in_features_), int8_t{0});
  std::fill_n(of.min_codes, format_.num_codes(in_features_), int8_t{0});
}

void TileRows::pack(std::byte* to) const {
  std::memset(to, 0, static_cast<size_t>(layout_.tile_bytes));
  for (int64_t u = 0; u < layout_.num_units; ++u) pack_unit(u, to + u * layout_.unit_bytes);
  if (layout_.num_groups == 1) pack_scales(0, to + int64_t{layout_.num_units} * layout_.unit_bytes);
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
    fours[s] |= (value & 0xfu) << (layout_.is_table ? 16 * h + 4 * j : 8 * j + 4 * h);
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
      const int64_t scale_at = (layout_.has_codes ? r : at) * layout_.scale_bytes;
      write_scale(scales_[shared], layout_.scale_bytes, unit + layout_.scales_begin + scale_at);
      if (layout_.has_min)
        write_scale(mins_[shared], layout_.scale_bytes, unit + layout_.mins_begin + scale_at);
      if (!layout_.has_codes) continue;
      const auto code = static_cast<size_t>(r * num_codes + group);
      unit[layout_.codes_begin + at] = static_cast<std::byte>(scale_codes_[code]);
      if (layout_.has_min)
        unit[layout_.min_codes_begin + at] = static_cast<std::byte>(min_codes_[code]);
    }
  }
}

}  // namespace llmserve::cuda
