// Hands the tensors of a checkpoint to layers, by name, checked.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "core/buffer.h"
#include "core/tensor.h"
#include "io/checkpoint.h"
#include "io/packed_file.h"
#include "kernels/backend.h"
#include "layers/deferred_weight.h"

namespace llmserve {

enum class WeightGroup : uint8_t { kEmbedding, kAttention, kMlp, kNorm, kLmHead };
inline constexpr int kNumWeightGroups = 5;
std::string_view name(WeightGroup group);

struct WeightReport {
  std::array<int64_t, kNumWeightGroups> group_bytes{};  // by WeightGroup
  int64_t mapped_bytes = 0;  // of them, read in place from the file: page cache, not memory
  std::vector<const LinearFormat*> integers;  // the formats that linear layers are in, if any
  // A row of activations as integers, beside the linear layer where it takes most; 0 if none runs
  // on integers.
  int64_t activation_bytes = 0;
  // As EngineMetrics has them; 0 when planning.
  int64_t read_us = 0;
  int64_t pack_us = 0;
  std::vector<std::string> unused_tensors;  // in the checkpoint, asked for by no layer; sorted
  int64_t total_bytes() const;
};

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

// What weights are kept as.
struct WeightFormat {
  DType dtype = DType::kF32;               // kF32 or kBF16
  const LinearFormat* integers = nullptr;  // of linear layers, the head included; null: dtype
  // Without `integers`: blocks of a file that linear() can run on stay what they are.
  bool keeps_blocks = false;
};

// Linear weights that a load takes from a file instead of packing them, and those that could be in
// one afterwards.
struct PackedWeights {
  std::unique_ptr<PackedFile> file;   // null: none
  std::vector<PackedTensor> tensors;  // of all linear layers; their model keeps the bytes
  bool is_from_file = true;           // all of them
};

// Every method finds a tensor (by its name, or without the name's first word: base models are saved
// without "model." or "transformer."), checks dtype and shape, counts its bytes under `group` and,
// when loading, brings it to the backend's memory, refuses NaN and infinity and lets go of the
// file's pages. Errors are CorruptFile and name file, tensor, what was expected and what came.
//
// When planning (`load` false) it does all but read: the weights come back with their sizes and no
// data. So one piece of code builds a model and says what it will take. A checkpoint without
// tensors has every tensor that is asked for, stored as the format's dtype.
class WeightLoader {
 public:
  // `deferred`: where the linear weights go that lie in the file as they are and are to be packed
  // later; null: all are packed now. Throws NotSupported if the backend cannot run the format.
  WeightLoader(const Checkpoint& checkpoint, Backend& backend, const WeightFormat& format,
               bool load, PackedWeights* packed = nullptr,
               std::vector<DeferredWeight>* deferred = nullptr);

  // A tensor, or some rows of one that holds several weights.
  struct Part {
    std::string name;
    int64_t size = 0;   // rows of a matrix, elements of a vector
    int64_t begin = 0;  // the first of them in the tensor
    int64_t of = 0;     // rows that the tensor has in all; 0: size
    int64_t width = 0;  // of a matrix that is read as one vector, row after row; 0: a vector
    int64_t num_rows() const { return of == 0 ? size : of; }
  };
  // The [N_i, K] matrices, stacked along N and packed, in one weight unless they are kept as blocks
  // of several kinds. `is_transposed`: the file has them as whole tensors [K, N_i].
  std::vector<LinearWeight> linear(WeightGroup group, const std::vector<Part>& parts,
                                   int64_t in_features, bool is_transposed = false);
  // Vectors laid end to end, as f32.
  VectorWeight vector(WeightGroup group, const std::vector<Part>& parts);
  VectorWeight vector(WeightGroup group, const std::string& name, int64_t size) {
    return vector(group, {Part{name, size}});
  }
  // [rows, columns] as the file has it, row-major; on a device, blocks are expanded.
  TableWeight table(WeightGroup group, const std::string& name, int64_t rows, int64_t columns);

  // Where the weights are, and what they will run on.
  const Backend& backend() const { return backend_; }

  // A tensor that may be in the file and is not needed.
  void ignore(const std::string& name) { used_.insert(name); }

  // What was taken so far, and what was not.
  WeightReport report() const;

 private:
  const TensorEntry* look_up(const std::string& name) const;
  const TensorEntry& find(const std::string& name, std::initializer_list<int64_t> shape);
  void refuse_scaled_f8(const TensorEntry& entry) const;
  const TensorEntry& imagine(std::initializer_list<int64_t> shape);
  // `first` is the place of the tensor's first element in the entry.
  void check_finite(const TensorEntry& entry, const ConstTensor& tensor, int64_t first = 0);
  void check_finite_blocks(const TensorEntry& entry);
  void count(WeightGroup group, int64_t num_bytes);
  using Parts = std::span<const Part>;
  using Entries = std::span<const TensorEntry* const>;  // of Parts
  // The blocks that a tensor of linear() is kept in, or null.
  const QuantFormat* kept_blocks(const TensorEntry& entry, bool is_transposed) const;
  // The weight's sizes and format, counted, without its data.
  LinearWeight plan_linear(WeightGroup group, Parts parts, int64_t in_features,
                           const LinearFormat* integers);
  // Fills the planned weight from packed_'s file, or notes that this cannot be done.
  bool take_packed(const std::string& name, LinearWeight& planned);
  LinearWeight pack_values(const LinearWeight& planned, Parts parts, Entries entries,
                           bool is_transposed);
  LinearWeight pack_rows(const LinearWeight& planned, std::span<const ConstTensor> views);
  LinearWeight defer_rows(const LinearWeight& planned, std::span<const ConstTensor> views,
                          Parts parts, Entries entries);
  LinearWeight pack_blocks(const LinearWeight& planned, Parts parts, Entries entries);

  const Checkpoint& checkpoint_;
  Backend& backend_;
  WeightFormat format_;
  bool load_;
  PackedWeights* packed_;  // null: none are taken or noted
  std::vector<DeferredWeight>* deferred_;
  std::array<int64_t, kNumWeightGroups> group_bytes_{};
  int64_t mapped_bytes_ = 0;
  std::vector<const LinearFormat*> integers_;
  int64_t activation_bytes_ = 0;
  int64_t read_us_ = 0;
  int64_t pack_us_ = 0;
  std::unordered_set<std::string> used_;
  TensorEntry imagined_;
};

}  // namespace llmserve
