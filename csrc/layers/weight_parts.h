// Which rows of which tensors make a weight, and which slice of it a rank has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmserve {

// A tensor, or some rows of one that holds several weights.
struct WeightPart {
  std::string name;
  int64_t size = 0;      // rows of a matrix, elements of a vector
  int64_t begin = 0;     // the first of them in the tensor
  int64_t of = 0;        // rows that the tensor has in all; 0: size
  int64_t width = 0;     // of a matrix that is read as one vector, row after row; 0: a vector
  int64_t num_runs = 1;  // runs of `size` rows that are taken …
  int64_t stride = 0;    // … with so many rows from the beginning of one to that of the next

  int64_t in_begin = 0;    // of a matrix, the first element of K that is taken …
  int64_t in_of = 0;       // … and how many the tensor has; 0: those that are taken
  int64_t step = 1;        // from one taken row to the next: 2 where two weights alternate
  bool is_vector = false;  // the tensor is the one row of a matrix, [K]
  // Of a tensor of several matrices [num_matrices, rows, K], or vectors [num_matrices, elements],
  // the one that is taken. 0: the tensor is one matrix, or vector.
  int64_t num_matrices = 0;
  int64_t matrix = 0;

  int64_t num_rows() const { return of == 0 ? size : of; }
  // The row of the tensor, all matrices one below another, that is taken as row n.
  int64_t row(int64_t n) const { return matrix * num_rows() + begin + n * step; }
};

// Along which dimension of a linear weight [N, K] ranks share it. kOutput: each has some output
// columns, y[:, n]. kInput: each has some of K, and their outputs add up.
enum class ShardAxis : uint8_t { kOutput, kInput };

struct IndexRange {
  int64_t begin = 0;
  int64_t size = 0;
};

// Rank `rank` of `size`. What is cut consists of equal units that stay whole (KV heads, blocks).
// Ranks have consecutive units, and the first ones one more where the number is not a multiple.
struct Shard {
  ShardAxis axis = ShardAxis::kOutput;
  int32_t rank = 0;
  int32_t size = 1;
  int64_t num_units = 0;  // of each part; 0: every row, or element of K, is one
  IndexRange range{};     // what the rank has, in the place of all that; of size 0: as above

  bool is_cut() const { return size > 1 || range.size > 0; }
  // The rank's part of `count` rows or elements. Precondition: whole units, at least one a rank.
  IndexRange of(int64_t count) const;
};

// The rank's rows of the parts, each in one run of its tensor, in their order. An input shard has
// them all.
std::vector<WeightPart> rows_of(std::span<const WeightPart> parts, const Shard& shard);

}  // namespace llmserve
