#include "layers/quantized/coded_weight.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "core/float_types.h"
#include "quant/fp8_activations.h"

namespace llmserve {
namespace {

constexpr std::array<int8_t, 16> kTwiceE2M1{0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

ScaleType stored_type(const ScaleMatrix& scales) {
  if (!scales.array || scales.factor != 1.0f) return scales.planned_type;
  switch (scales.array.entry->dtype) {
    case DType::kF16:
      return ScaleType::kF16;
    case DType::kBF16:
      return ScaleType::kBF16;
    case DType::kF8E4M3:
      return ScaleType::kE4M3;
    case DType::kU8:
      return ScaleType::kPowerOfTwo;
    default:
      return ScaleType::kF32;
  }
}

// The columns by their groups; null unless all groups are full, but for the last.
std::shared_ptr<const std::vector<int32_t>> order_of_groups(const std::vector<int32_t>& group_of,
                                                            int64_t group) {
  auto order = std::make_shared<std::vector<int32_t>>(group_of.size());
  std::iota(order->begin(), order->end(), 0);
  std::ranges::stable_sort(*order, {}, [&](int32_t k) { return group_of[static_cast<size_t>(k)]; });
  for (size_t i = 0; i < order->size(); ++i)
    if (group_of[static_cast<size_t>((*order)[i])] != static_cast<int64_t>(i) / group)
      return nullptr;
  return order;
}

// Rows that a thread has read together.
struct Strip {
  uint64_t of = 0;  // which weight; 0: none
  int64_t first = 0;
  std::vector<uint8_t> codes;
};

std::atomic<uint64_t> last_id{0};

}  // namespace

std::span<const float> e4m3_numbers() {
  static const std::array<float, 256> kNumbers = [] {
    std::array<float, 256> numbers;
    for (size_t code = 0; code < numbers.size(); ++code)
      numbers[code] = fp8_to_f32(static_cast<uint8_t>(code));
    return numbers;
  }();
  return kNumbers;
}

std::span<const float> e2m1_numbers() {
  static constexpr std::array<float, 16> kNumbers{0,    0.5,  1,  1.5,  2,  3,  4,  6,
                                                  -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  return kNumbers;
}

float ScaleMatrix::element(int64_t i) const {
  float value = array.value(i);
  if (nested)
    value =
        nested->table.value(array.byte(i)) * nested->outer.value(i / nested->size) + nested->offset;
  // That of an infinite one would be 0, and all weights with it.
  if (is_reciprocal)
    value = std::isinf(value) ? std::numeric_limits<float>::quiet_NaN() : 1.0f / value;
  return factor == 1.0f ? value : value * factor;
}

CodedWeight::CodedWeight(std::string description, const ModuleTensors& tensors, CodedParts parts)
    : QuantizedWeight(std::move(description), tensors.entries()),
      parts_(std::move(parts)),
      num_rows_(tensors.rows() * std::max<int64_t>(1, tensors.request().num_matrices)),
      num_columns_(tensors.columns()),
      id_(++last_id) {
  choose_format();
}

void CodedWeight::choose_format() {
  const int64_t k = num_columns_;
  const int64_t group = parts_.flat_block > 0 ? parts_.flat_block : parts_.group;
  if (parts_.column_factor || (parts_.flat_block > 0 && k % group != 0)) return;
  LinearFormat traits{.bits = parts_.bits == 7 ? 8 : parts_.bits,
                      .group_size = group >= k ? 0 : group,
                      .has_zero = static_cast<bool>(parts_.zeros) || parts_.has_zeros,
                      .outlier_threshold = parts_.outlier_threshold};
  traits.scale_type =
      traits.group_size == 0 || parts_.scales.nested ? ScaleType::kF32 : stored_type(parts_.scales);
  if (parts_.numbers.data() == e4m3_numbers().data()) {
    traits.is_fp8 = true;
  } else if (parts_.numbers.data() == e2m1_numbers().data()) {
    traits.table = kTwiceE2M1.data();
    traits.has_row_scale = parts_.has_row_scale;
  } else if (!parts_.numbers.empty()) {
    traits.values = parts_.numbers.data();
  }
  std::shared_ptr<const std::vector<int32_t>> order;
  if (!parts_.group_of.empty()) {
    order = order_of_groups(parts_.group_of, group);
    if (!order) return;
  }
  try {
    const LinearFormat& format = linear_format(traits);
    run_as(parts_.rounds_to_fp8 ? &with_fp8_activations(format) : &format, std::move(order));
  } catch (const NotSupported&) {
    // No kernel takes such groups: the weight is expanded, and the report says so.
  }
}

const uint8_t* CodedWeight::codes_of(int64_t n) const {
  thread_local Strip strip;
  const int64_t rows = parts_.codes.strip_rows();
  const int64_t first = n / rows * rows;
  if (strip.of != id_ || strip.first != first) {
    const int64_t count = std::min(rows, num_rows_ - first);
    strip.codes.resize(static_cast<size_t>(count * num_columns_));
    parts_.codes.read(first, count, num_columns_, strip.codes.data());
    strip.of = id_;
    strip.first = first;
  }
  return strip.codes.data() + (n - first) * num_columns_;
}

int CodedWeight::zero_of(int64_t n, int64_t group) const {
  if (!parts_.zeros) return parts_.zero;
  const uint32_t field = parts_.zeros.at(n, group);
  return static_cast<int>((field + static_cast<uint32_t>(parts_.zero_added)) & parts_.zero_mask);
}

void CodedWeight::values(int64_t n, const IndexRange& columns, float* out) const {
  const uint8_t* codes = codes_of(n);
  const float of_row = parts_.row_scale.array ? parts_.row_scale.at(n, 0) : 1.0f;
  int64_t known = -1;
  float scale = 0;
  int zero = 0;
  for (int64_t i = 0; i < columns.size; ++i) {
    const int64_t k = columns.begin + i;
    const int64_t group = parts_.flat_block > 0     ? (n * num_columns_ + k) / parts_.flat_block
                          : parts_.group_of.empty() ? (parts_.group == 0 ? 0 : k / parts_.group)
                                                    : parts_.group_of[static_cast<size_t>(k)];
    if (group != known) {
      known = group;
      scale = parts_.flat_block > 0 ? parts_.scales.element(group) : parts_.scales.at(n, group);
      if (parts_.row_scale.array) scale *= of_row;
      zero = parts_.flat_block > 0 ? 0 : zero_of(n, group);
    }
    const uint8_t code = codes[k];
    const float number =
        parts_.numbers.empty() ? static_cast<float>(code - zero) : parts_.numbers[code];
    out[i] = number * scale;
    if (parts_.column_factor) out[i] *= parts_.column_factor.value(k);
  }
}

bool CodedWeight::unpack(int64_t n, const IndexRange& columns, const QuantizedRow& to) const {
  const LinearFormat& format = *this->format();
  const uint8_t* codes = codes_of(n) + columns.begin;
  const int32_t* order = input_order() ? input_order()->data() : nullptr;
  // Codes of integers count from 0; 8 bits are kept from -128 on.
  const int center = parts_.zeros ? 1 << (parts_.codes.bits - 1) : parts_.zero;
  const int shift = !parts_.numbers.empty() ? 0
                    : format.bits == 8      ? -center
                                            : (1 << (format.bits - 1)) - center;
  int worst = 0;  // bits that no code of the format has
  const int highest = (1 << format.bits) - 1;
  if (!parts_.numbers.empty() || format.bits == 8) {
    for (int64_t i = 0; i < columns.size; ++i)
      to.values[i] = static_cast<int8_t>(codes[order ? order[i] : i] + shift);
  } else {
    for (int64_t i = 0; i < columns.size; ++i) {
      const int code = codes[order ? order[i] : i] + shift;
      worst |= code & ~highest;
      to.values[i] = static_cast<int8_t>(code);
    }
  }
  bool is_good = worst == 0;
  if (format.is_fp8)
    for (int64_t i = 0; i < columns.size; ++i) is_good &= (to.values[i] & 0x7f) != 0x7f;
  // The table holds twice the numbers.
  const float factor = format.table && !format.has_row_scale ? 0.5f : 1.0f;
  const int64_t of_row = format.num_groups(num_columns_);
  const int64_t num_groups = format.num_groups(columns.size);
  const int64_t first = columns.begin / format.group_elements(num_columns_);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t stored = first + g;
    const float scale = parts_.flat_block > 0 ? parts_.scales.element(n * of_row + stored)
                                              : parts_.scales.at(n, stored);
    to.scales[g] = scale * factor;
    to.mins[g] = 0;
    is_good &= std::isfinite(scale);
    if (format.has_zero) to.zeros[g] = static_cast<int16_t>(zero_of(n, stored) + shift);
  }
  if (format.has_row_scale) {
    const float scale = parts_.row_scale.at(n, 0);
    *to.row_scale = 0.5f * scale;
    is_good &= std::isfinite(scale);
  }
  return is_good;
}

std::vector<int32_t> read_group_index(const ModuleTensors& tensors, const StoredArray& g_idx,
                                      int64_t group, int64_t num_groups) {
  const int64_t k = tensors.columns();
  std::vector<int32_t> groups(static_cast<size_t>(k));
  bool is_trivial = true;
  for (int64_t i = 0; i < k; ++i) {
    const auto g = static_cast<int32_t>(g_idx.word(i));
    if (g < 0 || g >= num_groups)
      tensors.fail(g_idx,
                   concat("element ", i, ": expected a group in [0, ", num_groups, "), got ", g));
    groups[static_cast<size_t>(i)] = g;
    is_trivial = is_trivial && g == i / group;
  }
  if (is_trivial) groups.clear();
  return groups;
}

}  // namespace llmserve
