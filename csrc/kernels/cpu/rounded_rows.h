// Rows in bf16 as the products of bf16 take them, made by whoever has them first.
#pragma once

#include <cstdint>

namespace llmserve {

struct RoundedRows {
  uint16_t* data = nullptr;  // null: none
  int64_t stride = 0;        // elements

  uint16_t* row(int64_t i) const { return data + i * stride; }
};

// K of rows in bf16 as tiles of AMX take it: what follows the row's own is zero.
inline int64_t padded_to_tiles(int64_t k) { return (k + 31) / 32 * 32; }

// Elements from one row of x in bf16 to the next: whole cache lines, and one more, so that rows of
// a power of two do not fall into the same sets of the L1.
inline int64_t rounded_stride(int64_t k) { return padded_to_tiles(k) + 32; }

}  // namespace llmserve
