#include "quant/linear_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// Groups of 128 cost 0.125 bits a weight, groups of 32 half a bit, and lose less.
constexpr std::array kFormats{
    LinearFormat{.name = "int8", .summary = "8 bits, a scale an output channel", .bits = 8},
    LinearFormat{.name = "int4",
                 .summary = "4 bits, a scale a group of 128",
                 .bits = 4,
                 .group_size = 128,
                 .scale_type = ScaleType::kF16},
    LinearFormat{.name = "int4-g32",
                 .summary = "4 bits, a scale a group of 32",
                 .bits = 4,
                 .group_size = 32,
                 .scale_type = ScaleType::kF16},
    LinearFormat{.name = "int4-asym",
                 .summary = "4 bits, a scale and a minimum a group of 128",
                 .bits = 4,
                 .group_size = 128,
                 .has_min = true,
                 .scale_type = ScaleType::kF16},
    LinearFormat{.name = "int4-g32-asym",
                 .summary = "4 bits, a scale and a minimum a group of 32",
                 .bits = 4,
                 .group_size = 32,
                 .has_min = true,
                 .scale_type = ScaleType::kF16},
};

// Products of two magnitudes up to 128 * 127 that a 32-bit sum holds; with zero points, of 256 *
// 127.
constexpr int64_t kMaxGroup = 131072;

constexpr int kTableSize = 16;

// Adding 1.5 * 2^23 leaves the integer nearest, ties to even, in the low bits of |x| < 2^22, and
// the order of all others.
constexpr float kShift = 12582912.0f;

float reciprocal(float scale) {
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// Chains of comparisons, which compilers make vectors of: one alone would wait for itself.
constexpr int64_t kChains = 16;

// Integer comparisons order magnitudes.
int32_t largest_magnitude(const float* v, int64_t n) {
  const auto magnitude = [](float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; };
  int32_t most[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains)
    for (int64_t j = 0; j < kChains; ++j) most[j] = std::max(most[j], magnitude(v[i + j]));
  for (; i < n; ++i) most[0] = std::max(most[0], magnitude(v[i]));
  return *std::max_element(most, most + kChains);
}

// The smallest and the largest of n values.
std::pair<float, float> range_of(const float* v, int64_t n) {
  float low[kChains];
  float high[kChains];
  std::fill_n(low, kChains, v[0]);
  std::fill_n(high, kChains, v[0]);
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains) {
    for (int64_t j = 0; j < kChains; ++j) {
      low[j] = v[i + j] < low[j] ? v[i + j] : low[j];
      high[j] = v[i + j] > high[j] ? v[i + j] : high[j];
    }
  }
  for (; i < n; ++i) {
    low[0] = std::min(low[0], v[i]);
    high[0] = std::max(high[0], v[i]);
  }
  const float lowest = *std::min_element(low, low + kChains);
  const float highest = *std::max_element(high, high + kChains);
  if (lowest != 0) return {lowest, highest};
  // The first of zeros, and the last, whatever the chains: their signs stay.
  const auto [first, last] = std::minmax_element(v, v + n);
  return {*first, *last};
}

// Bounded as integers, since compilers make no vectors of bounds that NaN passes.
void round_group(const float* v, int64_t n, float added, float inverse, float offset,
                 int32_t lowest, int32_t highest, int8_t* q) {
  constexpr auto kZero = std::bit_cast<int32_t>(kShift);
  for (int64_t i = 0; i < n; ++i) {
    const float shifted = ((v[i] + added) * inverse + offset) + kShift;
    const int32_t x = std::bit_cast<int32_t>(shifted);
    const int32_t bounded = std::min(std::max(x, kZero + lowest), kZero + highest);
    q[i] = static_cast<int8_t>(bounded - kZero);
  }
}

void quantize_symmetric_8(const LinearFormat& format, const float* v, int64_t n, int8_t* q,
                          float* scale) {
  *scale = stored_scale(format, std::bit_cast<float>(largest_magnitude(v, n)) / 127.0f);
  round_group(v, n, 0.0f, reciprocal(*scale), 0.0f, -127, 127, q);
}

void quantize_symmetric_4(const LinearFormat& format, const float* v, int64_t n, int8_t* q,
                          float* scale) {
  const int32_t most = largest_magnitude(v, n);
  const float* at = std::find_if(
      v, v + n, [&](float x) { return (std::bit_cast<int32_t>(x) & 0x7fffffff) == most; });
  *scale = stored_scale(format, *at / -8.0f);
  round_group(v, n, 0.0f, reciprocal(*scale), 8.0f, 0, 15, q);
}

void quantize_with_min(const LinearFormat& format, const float* v, int64_t n, int8_t* q,
                       float* scale, float* min) {
  const auto [lowest, highest] = range_of(v, n);
  *scale = stored_scale(format, (highest - lowest) / 15.0f);
  *min = stored_scale(format, -lowest);
  round_group(v, n, *min, reciprocal(*scale), 0.0f, 0, 15, q);
}

// Numbers of a table, as describe() has them.
template <class T>
void write_table(std::ostringstream& out, const char* label, const T* table) {
  if (!table) return;
  out << ", " << label;
  for (int i = 0; i < kTableSize; ++i) out << ' ' << +table[i];
}

constexpr std::string_view kScaleNames[] = {"float32", "float16", "power-of-two", "bfloat16",
                                            "fp8"};

// "int4 g128, zero points, bfloat16 scales".
std::string name_of(const LinearFormat& format) {
  std::ostringstream out;
  const char* kind = format.values ? "float" : format.table ? "table" : "int";
  if (format.is_fp8)
    out << "fp8";
  else
    out << kind << format.bits;
  if (format.group_size > 0) out << " g" << format.group_size;
  if (format.has_zero) out << ", zero points";
  if (format.has_min) out << ", minima";
  out << ", " << kScaleNames[static_cast<size_t>(format.scale_type)] << " scales";
  if (format.has_scale_codes()) out << " of " << (1 << format.scale_shift) << " groups";
  if (format.has_row_scale) out << ", row scales";
  if (format.outlier_threshold > 0) out << ", outliers from " << format.outlier_threshold;
  return out.str();
}

// What no kernel takes, or nothing.
std::string_view refused_trait(const LinearFormat& format) {
  const int num_kinds = (format.table != nullptr) + (format.values != nullptr) + format.is_fp8;
  const bool is_plain = num_kinds == 0;
  const bool is_4_bits = format.table || format.values;
  if (num_kinds > 1) return "numbers of several kinds";
  if (format.bits != 8 && (format.bits < 2 || format.bits > 6)) return "bits";
  if ((is_4_bits && format.bits != 4) || (format.is_fp8 && format.bits != 8)) return "bits";
  if (format.group_size < 0 || format.group_size % (format.bits == 5 ? 32 : 16) != 0)
    return "group_size";
  if (format.has_zero && (!is_plain || format.has_min || format.has_scale_codes()))
    return "zero points";
  if (format.has_min && !is_plain) return "minima";
  if (format.has_scale_codes() && format.scale_type != ScaleType::kF16) return "shared scales";
  if (format.outlier_threshold != 0 &&
      (!is_plain || format.bits != 8 || format.group_size != 0 || format.has_zero ||
       format.has_min || format.has_row_scale || !(format.outlier_threshold > 0)))
    return "outliers";
  return {};
}

// Formats that were made, with what they point to. Only added to, so that addresses stay.
struct MadeFormat {
  LinearFormat format;
  std::string traits;
  std::string name;
  std::array<int8_t, kTableSize> table{};
  std::array<float, kTableSize> values{};

  explicit MadeFormat(const LinearFormat& given)
      : format(given), traits(describe(given)), name(given.name) {
    if (name.empty()) name = name_of(given);
    if (given.table) std::copy_n(given.table, kTableSize, table.begin());
    if (given.values) std::copy_n(given.values, kTableSize, values.begin());
    format.name = name;
    format.summary = {};
    format.table = given.table ? table.data() : nullptr;
    format.values = given.values ? values.data() : nullptr;
  }
};

}  // namespace

std::span<const LinearFormat> linear_format_registry() { return kFormats; }

std::string describe(const LinearFormat& format) {
  std::ostringstream out;
  out.precision(9);
  out << name_of(format);
  write_table(out, "of", format.table);
  write_table(out, "of", format.values);
  return out.str();
}

const LinearFormat& linear_format(const LinearFormat& given) {
  std::array<float, kTableSize> rounded{};
  LinearFormat traits = given;
  if (given.values) {
    for (size_t i = 0; i < kTableSize; ++i) rounded[i] = bf16_to_f32(f32_to_bf16(given.values[i]));
    traits.values = rounded.data();
  }
  const std::string_view refused = refused_trait(traits);
  if (!refused.empty())
    throw NotSupported(
        concat("weights of ", describe(traits), " are not supported: their ", refused));
  const std::string wanted = describe(traits);
  for (const LinearFormat& format : kFormats)
    if (describe(format) == wanted) return format;
  static std::mutex mutex;
  static std::deque<MadeFormat> made;
  const std::lock_guard lock(mutex);
  for (const MadeFormat& each : made)
    if (each.traits == wanted) return each.format;
  return made.emplace_back(traits).format;
}

const LinearFormat& find_linear_format(std::string_view name) {
  std::ostringstream names;
  for (const LinearFormat& format : kFormats) {
    if (format.name == name) return format;
    names << (names.tellp() > 0 ? ", " : "") << format.name;
  }
  throw NotSupported(
      concat("quantization '", name, "' is not supported; use one of: ", names.str()));
}

void check_fits(const LinearFormat& format, const std::string& tensor, int64_t k) {
  const int64_t shared = format.group_size << format.scale_shift;
  if (format.has_scale_codes() && k % shared != 0)
    throw NotSupported(concat("tensor \"", tensor, "\" has rows of ", k, " weights, and ",
                              format.name, " takes multiples of ", shared,
                              "; use quantization='int8'"));
  const int64_t most = format.has_zero ? kMaxGroup / 2 : kMaxGroup;
  if (!format.has_float_products() && format.group_elements(k) > most)
    throw NotSupported(concat("tensor \"", tensor, "\" has rows of ", k, " weights, and ",
                              format.name, " takes at most ", most,
                              "; use a format with groups, such as 'int4'"));
}

void quantize_row(const LinearFormat& format, const float* values, int64_t k,
                  const QuantizedRow& row) {
  const int64_t size = format.group_elements(k);
  for (int64_t g = 0; g < format.num_groups(k); ++g) {
    const float* v = values + g * size;
    int8_t* q = row.values + g * size;
    const int64_t n = std::min(size, k - g * size);
    row.mins[g] = 0;
    if (format.has_min)
      quantize_with_min(format, v, n, q, &row.scales[g], &row.mins[g]);
    else if (format.bits == 4)
      quantize_symmetric_4(format, v, n, q, &row.scales[g]);
    else
      quantize_symmetric_8(format, v, n, q, &row.scales[g]);
  }
}

int64_t padded_columns(const LinearFormat& format, int64_t k) {
  constexpr int64_t kWhole = 32;  // of what holds several weights in a byte
  const bool is_plain = format.bits == 8 && !format.has_zero && !format.has_row_scale &&
                        !format.has_min && !format.has_float_products();
  if (format.group_size > 0) return format.num_groups(k) * format.group_size;
  return is_plain ? k : (k + kWhole - 1) / kWhole * kWhole;
}

int64_t quantized_activation_bytes(const LinearFormat& format, int64_t k) {
  constexpr int64_t kLine = 64;
  constexpr int64_t kBetween = 32;  // floats between two rows
  const int64_t padded = (padded_columns(format, k) + kLine - 1) / kLine * kLine;
  if (format.has_float_products()) return (padded + kBetween) * 4;
  const int64_t outliers = format.outlier_threshold > 0 ? 8 * k + 4 : 0;
  return padded + format.num_groups(k) * 12 + outliers;
}

}  // namespace llmserve
