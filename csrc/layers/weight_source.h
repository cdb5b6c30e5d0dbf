// Where weights come from: the tensors of a checkpoint, found by name, checked, read.
//
// Errors are CorruptFile and name file, tensor, what was expected and what came.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "core/buffer.h"
#include "core/tensor.h"
#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/quantized/quantization_method.h"
#include "layers/weight_parts.h"

namespace llmserve {

// What weights are kept as.
struct WeightFormat {
  DType dtype = DType::kF32;               // kF32 or kBF16
  const LinearFormat* integers = nullptr;  // of linear layers, the head included; null: dtype
  // Without `integers`: blocks, and weights that were quantized elsewhere, stay what they are where
  // linear() can run on them.
  bool keeps_blocks = false;
};

// Slices of tensors that are stored alike, stacked along N: the rows of one linear weight.
struct StackedRows {
  std::vector<WeightPart> parts;            // each one run of rows
  std::vector<const TensorEntry*> entries;  // of the parts; of a quantized one the first of several
  // Of the parts; null where a part is one tensor.
  std::vector<std::shared_ptr<const QuantizedWeight>> quantized;
  std::vector<float> factors;            // of the parts: what their values are multiplied by
  int64_t in_features = 0;               // K of the tensors
  IndexRange columns;                    // of K
  bool is_transposed = false;            // the file has the tensors as [K, N_i]
  const LinearFormat* format = nullptr;  // what the weight is kept in; null: values
  // Of the weight as it is kept: LinearWeight::input_order.
  std::shared_ptr<const std::vector<int32_t>> input_order;

  int64_t num_rows() const;
  // Tells the weight from all others that a checkpoint can be made into.
  std::string name() const;
};

class WeightSource {
 public:
  // Throws what read_quantization_method() does.
  WeightSource(const Checkpoint& checkpoint, Backend& backend, const WeightFormat& format)
      : checkpoint_(checkpoint),
        backend_(backend),
        format_(format),
        quantization_(read_quantization_method(checkpoint)) {}

  // A tensor by its name, or without the name's first word: base models are saved without "model."
  // or "transformer.". A checkpoint without tensors has every one that is asked for, stored as the
  // format's dtype. The entry lives as long as the source.
  const TensorEntry& find(const std::string& name, std::initializer_list<int64_t> shape);
  // The rank's rows of matrices [N_i, K], in as many stacks as there are formats to keep, in order.
  // `keeps_blocks` false: in one stack, of values.
  std::vector<StackedRows> stack(std::span<const WeightPart> parts, int64_t in_features,
                                 bool is_transposed, const Shard& shard, bool keeps_blocks = true);

  // At multiples of how many elements K of a matrix can be cut so that the parts are kept as the
  // whole would be; 0: it cannot be cut.
  int64_t input_unit(const WeightPart& part, int64_t in_features, bool is_transposed);

  // The rank's elements of vectors, or of matrices that are read as one: `columns` is not used.
  StackedRows stack_vectors(std::span<const WeightPart> parts, const Shard& shard);

  // Whether the checkpoint has a matrix [N, K] of that name quantized, in several tensors.
  bool is_quantized(const std::string& name, int64_t rows, int64_t columns) {
    return find_quantized({.name = name, .rows = rows, .columns = columns}) != nullptr;
  }

  // A tensor that may be in the file and is not needed.
  void ignore(const std::string& name) { used_.insert(name); }
  // What the checkpoint says of activations, keys and values that is not used.
  std::vector<std::string> notes() const;
  // Those that nobody asked for; sorted.
  std::vector<std::string> unused() const;

  // Part i of the rows as finite values [N_i, K] in host memory: in place if they can be, and
  // otherwise in `buffer`, as `dtype` where they are not stored as is.
  ConstTensor values(const StackedRows& rows, size_t i, DType dtype, Buffer& buffer) const;
  // Row n of part i in the format that is kept; false if a scale is not finite.
  bool unpack(const StackedRows& rows, size_t i, int64_t n, const QuantizedRow& to) const;
  // All of a tensor, or one row, as finite values of `dtype`, as values() has them.
  ConstTensor values(const TensorEntry& entry, DType dtype, Buffer& buffer, int64_t row = -1) const;
  // A matrix in blocks, in the mapping: u8 [rows, bytes of a row], whose values are finite.
  ConstTensor blocks(const TensorEntry& entry) const;
  // The pages of all matrices that the rows are of go.
  void release(const StackedRows& rows) const;

  const Checkpoint& checkpoint() const { return checkpoint_; }
  Backend& backend() const { return backend_; }
  const WeightFormat& format() const { return format_; }

 private:
  const TensorEntry* look_up(const std::string& name) const;
  // The tensor of a part of a linear weight.
  const TensorEntry& find(const WeightPart& part, int64_t in_features, bool is_transposed);
  const TensorEntry& imagine(std::initializer_list<int64_t> shape);
  void refuse_scaled_f8(const TensorEntry& entry) const;
  // Null unless the checkpoint has it so.
  std::shared_ptr<const QuantizedWeight> find_quantized(const ModuleRequest& request);
  // What a linear weight of the tensor's blocks is kept in, or null.
  const LinearFormat* kept_blocks(const TensorEntry& entry, bool is_transposed, float factor) const;
  // Of blocks of a GGUF file, "<module>.scale" beside them, an f32 of each matrix; 1: there is
  // none.
  float find_factor(const WeightPart& part, const TensorEntry& entry);
  // What a quantized weight is kept in, or null.
  const LinearFormat* kept_format(const QuantizedWeight& weight, const IndexRange& columns,
                                  int64_t in_features) const;
  static int64_t input_unit(const LinearFormat* format);
  ConstTensor expand(const StackedRows& rows, size_t i, DType dtype, Buffer& buffer) const;
  // `first` is the place of the tensor's first element in the entry.
  void check_finite(const TensorEntry& entry, const ConstTensor& tensor, int64_t first = 0) const;

  const Checkpoint& checkpoint_;
  Backend& backend_;
  const WeightFormat format_;
  const std::unique_ptr<QuantizationMethod> quantization_;  // null: of none
  std::unordered_set<std::string> used_;
  std::deque<TensorEntry> imagined_;
};

}  // namespace llmserve
