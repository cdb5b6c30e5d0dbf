// How numbers are stored in files: plain elements, or blocks of small integers with scales. The one
// table of the formats that weights are read from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "core/dtype.h"
#include "quant/linear_format.h"

namespace llmserve {

struct QuantFormat {
  std::string_view name;  // as GGUF has it: "Q4_K"
  std::string_view summary;
  // GGUF's number of the type (ggml.h, enum ggml_type), none for what is not in GGUF files.
  std::optional<uint32_t> gguf_type;
  std::optional<DType> dtype;  // of a format without blocks
  int64_t block_elements = 1;
  int64_t block_bytes = 0;
  // num_blocks whole blocks, at any address, to num_blocks * block_elements values, each product
  // and sum rounded to f32 as the format's reference (gguf-py 0.19, quants.py) has it.
  void (*dequantize)(const std::byte* blocks, int64_t num_blocks, float* out) = nullptr;

  // What a linear layer runs on without dequantizing the blocks; null where it does not.
  const LinearFormat* integers = nullptr;
  // num_blocks whole blocks as such integers; scales and minima are rounded as the format stores
  // them. Returns false if one is not finite.
  bool (*unpack)(const std::byte* blocks, int64_t num_blocks, const QuantizedRow& row) = nullptr;

  // Bytes of so many elements, which fill whole blocks.
  int64_t num_bytes(int64_t num_elements) const {
    return num_elements / block_elements * block_bytes;
  }
};
std::span<const QuantFormat> quant_format_registry();

// nullptr if there is none.
const QuantFormat* find_quant_format(uint32_t gguf_type);
const QuantFormat* find_quant_format(DType dtype);

}  // namespace llmserve
