// Element types of tensors, in memory and in files.
#pragma once

#include <cstdint>
#include <string_view>

namespace llmserve {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF64,
  kI8,
  kU8,
  kI16,
  kI32,
  kI64,
  kBool,
  kF8E4M3,
  kF8E5M2
};

// Bytes of one element.
int64_t size_bytes(DType dtype);

// The name that users write: "float32", "bfloat16", "int8" …
std::string_view name(DType dtype);

}  // namespace llmserve
