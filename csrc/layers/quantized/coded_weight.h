// The common shape of quantized weights: codes with scales a group of K.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "layers/quantized/field_matrix.h"
#include "layers/quantized/module_tensors.h"
#include "layers/quantized/quantized_weight.h"

namespace llmserve {

// Scales that are codes themselves: table[code] * outer[i / size] + offset.
struct NestedScales {
  StoredArray table;
  StoredArray outer;
  int64_t size = 256;
  float offset = 0.0f;
};

// A number for each row n and group g. Of several matrices one after another the rows are counted
// within each.
struct ScaleMatrix {
  StoredArray array;
  int64_t row_stride = 0;  // elements from one row to the next, or from `rows` of them
  int64_t group_stride = 0;
  int64_t rows = 1;
  int64_t matrix_rows = 0;  // of each of several matrices; 0: there is one
  int64_t matrix_stride = 0;
  std::shared_ptr<const NestedScales> nested;
  ScaleType planned_type = ScaleType::kF32;  // without tensors
  bool is_reciprocal = false;
  float factor = 1.0f;

  float at(int64_t n, int64_t g) const {
    const int64_t matrix = matrix_rows == 0 ? 0 : n / matrix_rows;
    const int64_t row = n - matrix * matrix_rows;
    return element(matrix * matrix_stride + row / rows * row_stride + g * group_stride);
  }
  float element(int64_t i) const;
};

// weight[n, k] = number * (scale[n, g] * row_scale[n]) * column_factor[k], with g the group of k
// and each product rounded to f32. The number is q[n, k] - zero[n, g], or what a table has for q.
struct CodedParts {
  FieldMatrix codes;
  int bits = 4;                        // of the integers, which may lie in wider fields
  std::span<const float> numbers;      // [2^bits]: the table; empty: integers
  std::shared_ptr<const void> keeper;  // of `numbers`, if somebody has to
  ScaleMatrix scales;
  FieldMatrix zeros;              // of groups, where they have zero points
  int zero_added = 0;             // to each of them …
  uint32_t zero_mask = 255;       // … of which these bits count
  int zero = 0;                   // without `zeros`: of all
  ScaleMatrix row_scale;          // if there is any
  bool has_zeros = false;         // without tensors: what they will have
  bool has_row_scale = false;     // always set
  StoredArray column_factor;      // [K], if there is any
  std::vector<int32_t> group_of;  // [K]; empty: k / group
  int64_t group = 0;              // elements of K; 0: the whole row
  int64_t flat_block = 0;  // above 0: scales go with so many elements of the matrix, row after row
  float outlier_threshold = 0;  // activations from this magnitude on are not rounded; 0: none
  bool rounds_to_fp8 = false;   // of E4M3: the scheme has activations in it, too
};

// The values of all codes of E4M3 [256], and of E2M1 [16].
std::span<const float> e4m3_numbers();
std::span<const float> e2m1_numbers();

class CodedWeight final : public QuantizedWeight {
 public:
  // For [N, K]; without tensors (ModuleTensors::exist) a weight that can only be planned.
  CodedWeight(std::string description, const ModuleTensors& tensors, CodedParts parts);

  void values(int64_t n, const IndexRange& columns, float* out) const override;
  bool unpack(int64_t n, const IndexRange& columns, const QuantizedRow& to) const override;

 private:
  void choose_format();
  const uint8_t* codes_of(int64_t n) const;  // [K]; until the thread's next call
  int zero_of(int64_t n, int64_t group) const;

  CodedParts parts_;
  int64_t num_rows_;
  int64_t num_columns_;
  uint64_t id_;
};

// Throws CorruptFile unless every element of I32 [K] is in [0, num_groups). Empty if they are k /
// group.
std::vector<int32_t> read_group_index(const ModuleTensors& tensors, const StoredArray& g_idx,
                                      int64_t group, int64_t num_groups);

}  // namespace llmserve
