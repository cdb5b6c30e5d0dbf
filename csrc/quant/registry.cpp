// The storage formats.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

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
    row<BlockQ8_0, 32>("Q8_0", "32 signed bytes and a scale", 8),
    row<BlockQ4_0, 32>("Q4_0", "32 values of 4 bits and a scale", 2),
    row<BlockQ4_1, 32>("Q4_1", "32 values of 4 bits, a scale and a minimum", 3),
    row<BlockQ5_0, 32>("Q5_0", "32 values of 5 bits and a scale", 6),
    row<BlockQ5_1, 32>("Q5_1", "32 values of 5 bits, a scale and a minimum", 7),
    row<BlockQ2_K, 256>("Q2_K", "16 groups of 16 values of 2 bits, scales and minima", 10),
    row<BlockQ3_K, 256>("Q3_K", "16 groups of 16 values of 3 bits, scales", 11),
    row<BlockQ4_K, 256>("Q4_K", "8 groups of 32 values of 4 bits, scales and minima", 12),
    row<BlockQ5_K, 256>("Q5_K", "8 groups of 32 values of 5 bits, scales and minima", 13),
    row<BlockQ6_K, 256>("Q6_K", "16 groups of 16 values of 6 bits, scales", 14),
    row<BlockIQ4_NL, 32>("IQ4_NL", "32 values of a table of 16 and a scale", 20),
    row<BlockMXFP4, 32>("MXFP4", "32 values of E2M1 and a power of two", 39),
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
