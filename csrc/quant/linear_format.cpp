#include "quant/linear_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
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

// Products of two magnitudes up to 128 * 127 that a 32-bit sum holds.
constexpr int64_t kMaxGroup = 131072;

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

// The smallest and the largest of n values, n a multiple of kChains.
std::pair<float, float> range_of(const float* v, int64_t n) {
  float low[kChains];
  float high[kChains];
  std::copy_n(v, kChains, low);
  std::copy_n(v, kChains, high);
  for (int64_t i = kChains; i < n; i += kChains) {
    for (int64_t j = 0; j < kChains; ++j) {
      low[j] = v[i + j] < low[j] ? v[i + j] : low[j];
      high[j] = v[i + j] > high[j] ? v[i + j] : high[j];
    }
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

}  // namespace

std::span<const LinearFormat> linear_format_registry() { return kFormats; }

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
  if (format.group_size > 0 && k % format.group_size != 0)
    throw NotSupported(concat(
        "tensor \"", tensor, "\" has rows of ", k, " weights, and ", format.name,
        " takes multiples of ", format.group_size,
        k % 32 == 0 ? "; use quantization='int4-g32' or 'int8'" : "; use quantization='int8'"));
  if (format.group_elements(k) > kMaxGroup)
    throw NotSupported(concat("tensor \"", tensor, "\" has rows of ", k, " weights, and ",
                              format.name, " takes at most ", kMaxGroup,
                              "; use a format with groups, such as 'int4'"));
}

void quantize_row(const LinearFormat& format, const float* values, int64_t k,
                  const QuantizedRow& row) {
  const int64_t n = format.group_elements(k);
  for (int64_t g = 0; g < format.num_groups(k); ++g) {
    const float* v = values + g * n;
    int8_t* q = row.values + g * n;
    row.mins[g] = 0;
    if (format.has_min)
      quantize_with_min(format, v, n, q, &row.scales[g], &row.mins[g]);
    else if (format.bits == 4)
      quantize_symmetric_4(format, v, n, q, &row.scales[g]);
    else
      quantize_symmetric_8(format, v, n, q, &row.scales[g]);
  }
}

int64_t quantized_activation_bytes(const LinearFormat& format, int64_t k) {
  return (k + 63) / 64 * 64 + format.num_groups(k) * 12;
}

}  // namespace llmserve
