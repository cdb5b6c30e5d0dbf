// Small numbers of a few bits each, several to a word of a tensor.
#pragma once

#include <cstdint>

#include "layers/quantized/module_tensors.h"

namespace llmserve {

// A matrix [N, K] of unsigned fields that lie one after another along N or along K, from the low
// bits of a word on. A line is what lies along: row n, or column k.
struct FieldMatrix {
  StoredArray words;
  int bits = 4;
  int word_bits = 32;       // or 8
  bool is_along_k = true;   // a line is a row
  int64_t line_stride = 0;  // words from one line to the next
  int64_t word_stride = 1;  // words from one of a line to the line's next
  int per_word = 0;         // fields of a word; 0: as many as fit, the rest goes on in the next
  const uint8_t* order = nullptr;  // [per_word]: where a word has its i-th field; null: in order
  int64_t flat_columns = 0;        // above 0: one line has all rows, of so many fields each
  uint32_t flip = 0;               // of signed fields: what makes them count from 0
  // Above 0: several matrices of so many rows, one after another, of so many words each.
  int64_t matrix_rows = 0;
  int64_t matrix_stride = 0;

  explicit operator bool() const { return static_cast<bool>(words); }
  uint32_t at(int64_t n, int64_t k) const;
  // Rows that are read together fastest.
  int64_t strip_rows() const;
  // Rows [first, first + count) of K fields to out [count, k]. `first` is a multiple of
  // strip_rows().
  void read(int64_t first, int64_t count, int64_t k, uint8_t* out) const;

 private:
  uint32_t word(int64_t i) const { return word_bits == 8 ? words.byte(i) : words.word(i); }
  uint32_t mask() const { return (1u << bits) - 1; }
  // One of several matrices by itself.
  FieldMatrix matrix(int64_t i) const;
};

}  // namespace llmserve
