// Where weights go: nowhere (a plan), or into the backend's memory, packed at once or later, or
// from a file of packed weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "core/tensor.h"
#include "io/packed_file.h"
#include "kernels/backend.h"
#include "layers/deferred_weight.h"
#include "layers/weight_report.h"
#include "layers/weight_source.h"

namespace llmserve {

// A table that is read in place where it can be: a view and what keeps it alive.
struct TableWeight {
  ConstTensor view;                     // [rows, columns], or u8 [rows, bytes of a row] of blocks
  const QuantFormat* blocks = nullptr;  // the file's, whose rows are dequantized as they are read
  std::shared_ptr<const MappedFile> file;
  Buffer copy;  // instead of the file: on a device, or where the file's bytes are not aligned
};

// A vector as f32.
struct VectorWeight {
  int64_t size = 0;
  Buffer data;
  // [size], or none if there is no data.
  ConstTensor view() const {
    return data.data() ? ConstTensor(data.data(), DType::kF32, {size}) : ConstTensor{};
  }
};

// Linear weights that a load takes from a file instead of packing them, and those that could be in
// one afterwards.
struct PackedWeights {
  std::unique_ptr<PackedFile> file;   // null: none
  std::vector<PackedTensor> tensors;  // of all linear layers; their model keeps the bytes
  bool is_from_file = true;           // all of them
};

// Each method is given a weight as the plan has it, with sizes and format and without data, and
// brings the data as far as the sink does. Errors are the source's.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  virtual LinearWeight linear(LinearWeight planned, const StackedRows& rows) = 0;
  // The rows laid end to end.
  virtual VectorWeight vector(const StackedRows& rows) = 0;
  virtual VectorWeight constant(int64_t size, float value) = 0;
  virtual void table(const TensorEntry& entry, TableWeight& table) = 0;
};

// Which sink. Times and mapped bytes are added to `report`, which like the source stays.
struct WeightSinkOptions {
  bool load = false;                // false: a plan
  PackedWeights* packed = nullptr;  // null: none are taken or noted
  // Where the linear weights go that lie in the file as they are and are to be packed later; null:
  // all are packed now.
  std::vector<DeferredWeight>* deferred = nullptr;
};
std::unique_ptr<WeightSink> make_weight_sink(const WeightSinkOptions& options,
                                             const WeightSource& source, WeightReport& report);

}  // namespace llmserve
