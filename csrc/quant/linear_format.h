// How the weights of a linear layer are kept in memory as small integers: the one table of what
// `quantization` can be, and how floats become such integers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "core/float_types.h"

namespace llmserve {

// How the scales (and minima) of groups are kept: as powers of two their exponents alone are, 0 for
// what is below the least normal float. The order is that of cpu::ScaleStorage.
enum class ScaleType : uint8_t { kF32, kF16, kPowerOfTwo, kBF16, kE4M3 };
constexpr int64_t scale_bytes(ScaleType type) {
  constexpr int64_t kBytes[] = {4, 2, 1, 2, 1};
  return kBytes[static_cast<int>(type)];
}

// A row's weights go in groups along K, the last of which may be shorter, each with a scale: weight
// = scale * number(q), times the row's scale where it has one. What number is:
//   integers          q - zero_point, or q - z with the group's own zero point z; with minima, the
//                     weight is scale * q - min. 8 bits: q in [-128, 127]; 2 to 6 bits: q in [0,
//                     2^bits).
//   table             table[q], integers, of 4 bits
//   values            values[q], floats, of 4 bits
//   is_fp8            the E4M3 code q, of 8 bits
// Products of the first two are of integers, those of the others of floats: kernels/ops.h,
// LinearArgs.
struct LinearFormat {
  std::string_view name;  // LLM(quantization=...), or made of the traits
  std::string_view summary;
  int bits = 8;
  int64_t group_size = 0;  // elements of K; 0: the whole row
  bool has_min = false;
  ScaleType scale_type = ScaleType::kF32;
  // 2^scale_shift groups share a scale (and a minimum). If they are several, each group has a code
  // of 8 bits, signed, that the shared one is multiplied by.
  int scale_shift = 0;
  const int8_t* table = nullptr;  // [16], of 4 bits
  // Each group has an integer zero point z: in [0, 2^bits], and of 8 bits in [-128, 128].
  bool has_zero = false;
  bool has_row_scale = false;     // an f32 of each row of N
  const float* values = nullptr;  // [16], of 4 bits, each a bfloat16
  bool is_fp8 = false;            // E4M3, of 8 bits
  // Of a whole row of 8 bits: activations from this magnitude on are multiplied as floats; 0: none.
  float outlier_threshold = 0;

  constexpr bool has_float_products() const { return values != nullptr || is_fp8; }
  int zero_point() const {
    const bool is_centered = bits < 8 && !has_min && !has_zero && !table && !values;
    return is_centered ? 1 << (bits - 1) : 0;
  }
  // What the scale is multiplied by, of a group whose zero point is `zero`.
  int integer(int8_t q, int zero = 0) const { return table ? table[q] : q - zero_point() - zero; }
  constexpr int64_t num_groups(int64_t k) const {
    return group_size == 0 ? 1 : (k + group_size - 1) / group_size;
  }
  constexpr int64_t group_elements(int64_t k) const { return group_size == 0 ? k : group_size; }
  constexpr bool has_scale_codes() const { return scale_shift > 0; }
  constexpr int64_t num_scales(int64_t k) const { return num_groups(k) >> scale_shift; }
  constexpr int64_t num_codes(int64_t k) const { return has_scale_codes() ? num_groups(k) : 0; }
  constexpr int64_t num_zeros(int64_t k) const { return has_zero ? num_groups(k) : 0; }
};
// Those that LLM(quantization=...) rounds weights to.
std::span<const LinearFormat> linear_format_registry();

// Throws NotSupported that lists the names.
const LinearFormat& find_linear_format(std::string_view name);

// The one format of these traits, whatever it is called: a row of the registry, or one that is made
// the first time and stays, with a copy of its table, floats rounded to bfloat16. Without a name it
// is called after its traits: "int4 g128, zero points, bfloat16 scales". From any thread. Throws
// NotSupported that names the trait which no kernel takes.
const LinearFormat& linear_format(const LinearFormat& traits);

// All traits in words, tables included: the same for two formats if and only if their weights are
// packed and run alike.
std::string describe(const LinearFormat& format);

// Throws NotSupported, naming `tensor`, unless rows of K elements go in groups whose integer sums
// fit 32 bits; groups that share scales have to be whole.
void check_fits(const LinearFormat& format, const std::string& tensor, int64_t k);

// One row of a matrix as integers.
struct QuantizedRow {
  int8_t* values = nullptr;  // [K]
  float* scales = nullptr;   // [LinearFormat::num_scales]
  float* mins = nullptr;     // as many; zero where the format has none
  // [LinearFormat::num_codes]; of minima, zero where the format has none.
  int8_t* scale_codes = nullptr;
  int8_t* min_codes = nullptr;
  int16_t* zeros = nullptr;    // [LinearFormat::num_zeros]
  float* row_scale = nullptr;  // one, where the format has it
};

// Writes row `i` of a matrix. Called from several threads at once; does not throw.
using QuantizedRowReader = std::function<void(int64_t i, const QuantizedRow& row)>;

// Rounds finite values [K] to a row of the registry, each operation rounded to f32 and q to the
// nearest integer, ties to even. With h(x) the nearest scale that can be stored (float16 within
// +-65504, or float32 itself), v a group's values and m the one of largest magnitude, the first of
// equals:
//   8 bits           scale = h(|m| / 127)              q = v / scale, at most 127 of magnitude
//   4 bits           scale = h(m / -8)                 q = v / scale + 8, within [0, 15]
//   4 bits, minima   scale = h((max v - min v) / 15)   q = (v + min) / scale, within [0, 15]
//                    min = h(-min v)
// where x / scale is x * (1 / scale), and 0 if the scale is zero or its reciprocal is not finite.
// 4 bits use all 16 levels, as GGUF's Q4_0 does: the largest weight is one of them.
void quantize_row(const LinearFormat& format, const float* values, int64_t k,
                  const QuantizedRow& row);

// A scale or minimum as the format stores it: as it is, rounded to bfloat16, to float16 within
// +-65504 or to E4M3 within +-448, or, of a positive one, the power of two at or below it.
inline float stored_scale(const LinearFormat& format, float x) {
  constexpr float kMaxF16 = 65504.0f;
  if (format.scale_type == ScaleType::kF32) return x;
  if (format.scale_type == ScaleType::kBF16) return bf16_to_f32(f32_to_bf16(x));
  if (format.scale_type == ScaleType::kE4M3) return fp8_to_f32(f32_to_fp8(x));
  if (format.scale_type == ScaleType::kPowerOfTwo)
    return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000u);
  return f16_to_f32(f32_to_f16(std::clamp(x, -kMaxF16, kMaxF16)));
}

// K as kernels have it: whole groups, or, of one group, what bits of less than a byte go in.
int64_t padded_columns(const LinearFormat& format, int64_t k);

// Bytes that a row of activations takes beside a weight of this format: as integers, bytes in whole
// cache lines and three words a group, and its outliers; or as floats in whole cache lines.
int64_t quantized_activation_bytes(const LinearFormat& format, int64_t k);

}  // namespace llmserve
