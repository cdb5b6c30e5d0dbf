// A linear weight that a checkpoint has as small numbers with scales, in several tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "layers/weight_parts.h"
#include "quant/linear_format.h"

namespace llmserve {

// The matrix [N, K] that the tensors stand for. Immutable; its methods run on several threads at
// once and do not throw. Rows are read fastest in order.
class QuantizedWeight {
 public:
  virtual ~QuantizedWeight() = default;

  // Row n, columns `columns` of K, as the format's reference has them, in f32.
  virtual void values(int64_t n, const IndexRange& columns, float* out) const = 0;
  // The same as format() has it: all of K, or, without an input order, whole groups of it. False if
  // a scale is not finite, or a code none of the format's.
  virtual bool unpack(int64_t /*n*/, const IndexRange& /*columns*/,
                      const QuantizedRow& /*to*/) const {
    return false;
  }
  // What linear layers can run on without expanding the weight; null: they cannot.
  const LinearFormat* format() const { return format_; }
  // Column i of what unpack() writes is column (*input_order())[i] of the weight. Null: i.
  const std::shared_ptr<const std::vector<int32_t>>& input_order() const { return input_order_; }
  // "GPTQ, 4 bits, groups of 128", for people; the same for weights that are kept alike.
  const std::string& description() const { return description_; }
  // Whose pages go once the weight has been read.
  const std::vector<const TensorEntry*>& entries() const { return entries_; }

 protected:
  QuantizedWeight(std::string description, std::vector<const TensorEntry*> entries)
      : description_(std::move(description)), entries_(std::move(entries)) {}

  void run_as(const LinearFormat* format,
              std::shared_ptr<const std::vector<int32_t>> input_order = nullptr) {
    format_ = format;
    input_order_ = std::move(input_order);
  }

 private:
  std::string description_;
  std::vector<const TensorEntry*> entries_;
  const LinearFormat* format_ = nullptr;
  std::shared_ptr<const std::vector<int32_t>> input_order_;
};

}  // namespace llmserve
