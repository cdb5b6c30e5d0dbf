// The storage formats.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_types.h"
#include "quant/quant_format.h"

namespace llmserve {
namespace {

#include "quant/formats.inc"

template <class Block, int kElements>
void dequantize_blocks(const std::byte* blocks, int64_t num_blocks, float* out) {
  static_assert(alignof(Block) == 1, "blocks lie anywhere in a file");
  const auto* from = reinterpret_cast<const Block*>(blocks);
  for (int64_t i = 0; i < num_blocks; ++i) dequantize(from[i], out + i * kElements);
}

// Groups of 32, or of 16. Scales that are products of an f16 and 4, 6 or 8 bits stay such products,
// with 8 bits.
constexpr LinearFormat kQ8_0{
    .name = "Q8_0", .bits = 8, .group_size = 32, .scale_type = ScaleType::kF16};
constexpr LinearFormat kQ4_0{
    .name = "Q4_0", .bits = 4, .group_size = 32, .scale_type = ScaleType::kF16};
constexpr LinearFormat kQ4_1{
    .name = "Q4_1", .bits = 4, .group_size = 32, .has_min = true, .scale_type = ScaleType::kF16};
constexpr LinearFormat kQ5_0{
    .name = "Q5_0", .bits = 5, .group_size = 32, .scale_type = ScaleType::kF16};
constexpr LinearFormat kQ5_1{
    .name = "Q5_1", .bits = 5, .group_size = 32, .has_min = true, .scale_type = ScaleType::kF16};

constexpr LinearFormat kIQ4_NL{.name = "IQ4_NL",
                               .bits = 4,
                               .group_size = 32,
                               .scale_type = ScaleType::kF16,
                               .table = kValuesIQ4_NL};

// A block of 256 has a scale (and a minimum), each of its groups a code.
constexpr LinearFormat k_quant(std::string_view name, int bits, int64_t group_size, bool has_min) {
  return {.name = name,
          .bits = bits,
          .group_size = group_size,
          .has_min = has_min,
          .scale_type = ScaleType::kF16,
          .scale_shift = group_size == 16 ? 4 : 3};
}
constexpr LinearFormat kIQ4_XS{.name = "IQ4_XS",
                               .bits = 4,
                               .group_size = 32,
                               .scale_type = ScaleType::kF16,
                               .scale_shift = 3,
                               .table = kValuesIQ4_NL};
constexpr LinearFormat kMXFP4{.name = "MXFP4",
                              .bits = 4,
                              .group_size = 32,
                              .scale_type = ScaleType::kPowerOfTwo,
                              .table = kValuesMXFP4};
// Signs and magnitudes, or steps of an eighth, in 4 bits: a table of 16 has them all. The fraction
// that a block's scale is multiplied by is the row's, since halves would lose small ones.
constexpr LinearFormat iq_quant(std::string_view name, int64_t group_size, const int8_t* table,
                                bool has_fraction = true) {
  return {.name = name,
          .bits = 4,
          .group_size = group_size,
          .scale_type = ScaleType::kF16,
          .scale_shift = group_size == 16 ? 4 : 3,
          .table = table,
          .has_row_scale = has_fraction};
}
constexpr LinearFormat kIQ1_S = iq_quant("IQ1_S", 32, kValuesIQ1);
constexpr LinearFormat kIQ1_M = iq_quant("IQ1_M", 16, kValuesIQ1);
constexpr LinearFormat kIQ2_XXS = iq_quant("IQ2_XXS", 32, kValuesIQ2);
constexpr LinearFormat kIQ2_XS = iq_quant("IQ2_XS", 16, kValuesIQ2);
constexpr LinearFormat kIQ2_S = iq_quant("IQ2_S", 16, kValuesIQ2);
constexpr LinearFormat kIQ3_XXS = iq_quant("IQ3_XXS", 32, kValuesIQ3_XXS);
constexpr LinearFormat kIQ3_S = iq_quant("IQ3_S", 32, kValuesIQ3_S, /*has_fraction=*/false);
constexpr LinearFormat kNVFP4{.name = "NVFP4",
                              .bits = 4,
                              .group_size = 16,
                              .scale_type = ScaleType::kE4M3,
                              .table = kValuesMXFP4,
                              .has_row_scale = true};
constexpr LinearFormat kQ2_K = k_quant("Q2_K", 2, 16, true);
constexpr LinearFormat kQ3_K = k_quant("Q3_K", 3, 16, false);
constexpr LinearFormat kQ4_K = k_quant("Q4_K", 4, 32, true);
constexpr LinearFormat kQ5_K = k_quant("Q5_K", 5, 32, true);
constexpr LinearFormat kQ6_K = k_quant("Q6_K", 6, 16, false);

// A scale alone for 256 values, and so for 256 activations. Values of -1 to 2 go with a minimum,
// since the zero point of 2 bits is 2.
constexpr LinearFormat ternary(std::string_view name) {
  return {
      .name = name, .bits = 2, .group_size = 256, .has_min = true, .scale_type = ScaleType::kF16};
}
constexpr LinearFormat kTQ1_0 = ternary("TQ1_0");
constexpr LinearFormat kTQ2_0 = ternary("TQ2_0");

// As the format stores them. Returns how many are not finite; without branches, for vectors of
// them.
template <const LinearFormat& kFormat>
int store_scales(float* scales, int64_t count) {
  int num_bad = 0;
  for (int64_t g = 0; g < count; ++g) {
    num_bad += !(std::fabs(scales[g]) <= std::numeric_limits<float>::max());
    scales[g] = stored_scale(kFormat, scales[g]);
  }
  return num_bad;
}

template <class Block, int kElements, const LinearFormat& kFormat>
bool unpack_blocks(const std::byte* blocks, int64_t num_blocks, const QuantizedRow& row) {
  constexpr int64_t kScales = kFormat.num_scales(kElements);
  constexpr int64_t kCodes = kFormat.num_codes(kElements);
  const auto* from = reinterpret_cast<const Block*>(blocks);
  int64_t num_bad = 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const QuantizedRow to{.values = row.values + i * kElements,
                          .scales = row.scales + i * kScales,
                          .mins = row.mins + i * kScales,
                          .scale_codes = row.scale_codes + i * kCodes,
                          .min_codes = row.min_codes + i * kCodes,
                          .row_scale = row.row_scale};
    std::fill_n(to.mins, kScales, 0.0f);
    std::fill_n(to.min_codes, kCodes, int8_t{0});
    unpack(from[i], to);
    num_bad += store_scales<kFormat>(to.scales, kScales);
    if (kFormat.has_min) num_bad += store_scales<kFormat>(to.mins, kScales);
  }
  return num_bad == 0;
}

template <class Block, int kElements, const LinearFormat& kFormat>
constexpr QuantFormat integers(QuantFormat format) {
  format.integers = &kFormat;
  format.unpack = &unpack_blocks<Block, kElements, kFormat>;
  return format;
}

template <class Block, int kElements>
constexpr QuantFormat row(std::string_view name, std::string_view summary,
                          std::optional<uint32_t> gguf_type, std::optional<DType> dtype = {}) {
  return {.name = name,
          .summary = summary,
          .gguf_type = gguf_type,
          .dtype = dtype,
          .block_elements = kElements,
          .block_bytes = sizeof(Block),
          .dequantize = &dequantize_blocks<Block, kElements>};
}

constexpr std::array kFormats{
    row<F32Value, 1>("F32", "32-bit floats", 0, DType::kF32),
    row<F16Value, 1>("F16", "half precision", 1, DType::kF16),
    row<Bf16Value, 1>("BF16", "the upper half of F32", 30, DType::kBF16),
    row<F64Value, 1>("F64", "64-bit floats, rounded to F32", 28, DType::kF64),
    row<F8E4M3Value, 1>("F8_E4M3", "8-bit floats of 3 bits precision", {}, DType::kF8E4M3),
    row<F8E5M2Value, 1>("F8_E5M2", "8-bit floats of 2 bits precision", {}, DType::kF8E5M2),
    integers<BlockQ8_0, 32, kQ8_0>(row<BlockQ8_0, 32>("Q8_0", "32 signed bytes and a scale", 8)),
    integers<BlockQ4_0, 32, kQ4_0>(
        row<BlockQ4_0, 32>("Q4_0", "32 values of 4 bits and a scale", 2)),
    integers<BlockQ4_1, 32, kQ4_1>(
        row<BlockQ4_1, 32>("Q4_1", "32 values of 4 bits, a scale and a minimum", 3)),
    integers<BlockQ5_0, 32, kQ5_0>(
        row<BlockQ5_0, 32>("Q5_0", "32 values of 5 bits and a scale", 6)),
    integers<BlockQ5_1, 32, kQ5_1>(
        row<BlockQ5_1, 32>("Q5_1", "32 values of 5 bits, a scale and a minimum", 7)),
    integers<BlockQ2_K, 256, kQ2_K>(
        row<BlockQ2_K, 256>("Q2_K", "16 groups of 16 values of 2 bits, scales and minima", 10)),
    integers<BlockQ3_K, 256, kQ3_K>(
        row<BlockQ3_K, 256>("Q3_K", "16 groups of 16 values of 3 bits, scales", 11)),
    integers<BlockQ4_K, 256, kQ4_K>(
        row<BlockQ4_K, 256>("Q4_K", "8 groups of 32 values of 4 bits, scales and minima", 12)),
    integers<BlockQ5_K, 256, kQ5_K>(
        row<BlockQ5_K, 256>("Q5_K", "8 groups of 32 values of 5 bits, scales and minima", 13)),
    integers<BlockQ6_K, 256, kQ6_K>(
        row<BlockQ6_K, 256>("Q6_K", "16 groups of 16 values of 6 bits, scales", 14)),
    integers<BlockIQ4_NL, 32, kIQ4_NL>(
        row<BlockIQ4_NL, 32>("IQ4_NL", "32 values of a table of 16 and a scale", 20)),
    integers<BlockIQ4_XS, 256, kIQ4_XS>(
        row<BlockIQ4_XS, 256>("IQ4_XS", "8 groups of 32 values of that table, scales", 23)),
    integers<BlockMXFP4, 32, kMXFP4>(
        row<BlockMXFP4, 32>("MXFP4", "32 values of E2M1 and a power of two", 39)),
    integers<BlockNVFP4, 64, kNVFP4>(
        row<BlockNVFP4, 64>("NVFP4", "4 groups of 16 values of E2M1 and their scales", 40)),
    integers<BlockIQ1_S, 256, kIQ1_S>(row<BlockIQ1_S, 256>(
        "IQ1_S", "8 groups of 32 values of about -1, 0 and 1 from a grid, scales", 19)),
    integers<BlockIQ1_M, 256, kIQ1_M>(row<BlockIQ1_M, 256>(
        "IQ1_M", "16 groups of 16 values of about -1, 0 and 1 from a grid, scales", 29)),
    integers<BlockIQ2_XXS, 256, kIQ2_XXS>(row<BlockIQ2_XXS, 256>(
        "IQ2_XXS", "8 groups of 32 values of 6 from a grid of 256, scales", 16)),
    integers<BlockIQ2_XS, 256, kIQ2_XS>(row<BlockIQ2_XS, 256>(
        "IQ2_XS", "16 groups of 16 values of 6 from a grid of 512, scales", 17)),
    integers<BlockIQ2_S, 256, kIQ2_S>(row<BlockIQ2_S, 256>(
        "IQ2_S", "16 groups of 16 values of 6 from a grid of 1024, scales", 22)),
    integers<BlockIQ3_XXS, 256, kIQ3_XXS>(row<BlockIQ3_XXS, 256>(
        "IQ3_XXS", "8 groups of 32 values of 16 from a grid of 256, scales", 18)),
    integers<BlockIQ3_S, 256, kIQ3_S>(row<BlockIQ3_S, 256>(
        "IQ3_S", "8 groups of 32 values of 16 from a grid of 512, scales", 21)),
    integers<BlockTQ1_0, 256, kTQ1_0>(
        row<BlockTQ1_0, 256>("TQ1_0", "256 values of -1, 0 and 1, five a byte, and a scale", 34)),
    integers<BlockTQ2_0, 256, kTQ2_0>(
        row<BlockTQ2_0, 256>("TQ2_0", "256 values of -1, 0 and 1, four a byte, and a scale", 35)),
};

template <class Predicate>
const QuantFormat* find(Predicate matches) {
  const auto it = std::find_if(kFormats.begin(), kFormats.end(), matches);
  return it == kFormats.end() ? nullptr : &*it;
}

}  // namespace

std::span<const QuantFormat> quant_format_registry() { return kFormats; }

const QuantFormat* find_quant_format(uint32_t gguf_type) {
  return find([&](const QuantFormat& format) { return format.gguf_type == gguf_type; });
}

const QuantFormat* find_quant_format(DType dtype) {
  return find([&](const QuantFormat& format) { return format.dtype == dtype; });
}

}  // namespace llmserve
