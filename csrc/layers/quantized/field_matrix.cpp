#include "layers/quantized/field_matrix.h"

#include <algorithm>

namespace llmserve {
namespace {

// Words of a line, or lines, that are read for all rows of a strip before the next ones: 64 cache
// lines, which stay in the L1.
constexpr int64_t kBlock = 64;

}  // namespace

FieldMatrix FieldMatrix::matrix(int64_t i) const {
  FieldMatrix one = *this;
  one.matrix_rows = 0;
  one.words.data += i * matrix_stride * (word_bits / 8);
  return one;
}

uint32_t FieldMatrix::at(int64_t n, int64_t k) const {
  if (matrix_rows > 0) return matrix(n / matrix_rows).at(n % matrix_rows, k);
  const int64_t line = (is_along_k ? n : k) * line_stride;
  const int64_t i = is_along_k ? n * flat_columns + k : n;
  if (per_word > 0) {
    const int64_t within = i % per_word;
    const int64_t place = order ? order[within] : within;
    return (word(line + i / per_word * word_stride) >> place * bits & mask()) ^ flip;
  }
  const int64_t bit = i * bits;
  const int64_t offset = bit % word_bits;
  const int64_t first = line + bit / word_bits * word_stride;
  uint32_t field = word(first) >> offset;
  if (offset + bits > word_bits) field |= word(first + word_stride) << (word_bits - offset);
  return (field & mask()) ^ flip;
}

int64_t FieldMatrix::strip_rows() const {
  if (!is_along_k) return 64;        // half a cache line of words of 8 fields
  return word_stride == 1 ? 1 : 16;  // or a cache line of words, one a row
}

void FieldMatrix::read(int64_t first, int64_t count, int64_t k, uint8_t* out) const {
  if (matrix_rows > 0) {
    for (int64_t done = 0; done < count;) {
      const int64_t within = (first + done) % matrix_rows;
      const int64_t taken = std::min(count - done, matrix_rows - within);
      matrix((first + done) / matrix_rows).read(within, taken, k, out + done * k);
      done += taken;
    }
    return;
  }
  const int64_t along = is_along_k ? k : count;
  if (flat_columns % std::max(1, per_word) == 0 && flat_columns > 0 && word_stride == 1) {
    FieldMatrix rows = *this;
    rows.flat_columns = 0;
    rows.line_stride = flat_columns / per_word;
    return rows.read(first, count, k, out);
  }
  if (per_word == 0 || flat_columns > 0 || (!is_along_k && first % per_word != 0)) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < k; ++c) out[r * k + c] = static_cast<uint8_t>(at(first + r, c));
    return;
  }
  // Out of a word: `to` and on, `step` apart.
  const auto spread = [&](int64_t w, int64_t num_fields, uint8_t* to, int64_t step) {
    const uint32_t from = word(w);
    for (int64_t i = 0; i < num_fields; ++i) {
      const int64_t place = order ? order[i] : i;
      to[i * step] = static_cast<uint8_t>((from >> place * bits & mask()) ^ flip);
    }
  };
  const int64_t num_words = (along + per_word - 1) / per_word;
  const int64_t fields_of_last = along - (num_words - 1) * per_word;
  const auto fields_of = [&](int64_t w) {
    return w + 1 == num_words ? fields_of_last : int64_t{per_word};
  };
  if (is_along_k) {
    for (int64_t begin = 0; begin < num_words; begin += kBlock)
      for (int64_t r = 0; r < count; ++r)
        for (int64_t w = begin; w < std::min(begin + kBlock, num_words); ++w)
          spread((first + r) * line_stride + w * word_stride, fields_of(w),
                 out + r * k + w * per_word, 1);
    return;
  }
  for (int64_t begin = 0; begin < k; begin += kBlock)
    for (int64_t w = 0; w < num_words; ++w)
      for (int64_t c = begin; c < std::min(begin + kBlock, k); ++c)
        spread(c * line_stride + (first / per_word + w) * word_stride, fields_of(w),
               out + w * per_word * k + c, k);
}

}  // namespace llmserve
