// A model on disk: named tensors and the description of the model, whatever the format.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "quant/quant_format.h"

namespace llmserve {

// The sizes of a tensor's dimensions, row-major, held in place: see the assertion below.
class TensorShape {
 public:
  static constexpr size_t kMaxDims = 5;  // a video model's convolution; layers take kMaxRank

  TensorShape() = default;
  // Precondition: at most kMaxDims of them.
  TensorShape(std::initializer_list<int64_t> dims) {
    for (const int64_t dim : dims) push_back(dim);
  }

  size_t size() const { return static_cast<size_t>(num_dims_); }
  int64_t operator[](size_t d) const { return dims_[d]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + num_dims_; }
  // Precondition: size() < kMaxDims.
  void push_back(int64_t dim) { dims_[static_cast<size_t>(num_dims_++)] = dim; }

 private:
  std::array<int64_t, kMaxDims> dims_{};
  int8_t num_dims_ = 0;
};

// How the values of a file's tensor become those of the model's.
struct TensorStorage {
  // Of a tensor in blocks, whose dtype is then kU8: bytes. Its rows are whole blocks.
  const QuantFormat* blocks = nullptr;
  // Above 0: the rows of each of so many heads are stored in the order of rotary pairs, (0, D/2),
  // (1, D/2 + 1) …, instead of first and second halves.
  int64_t paired_heads = 0;
  float added = 0.0f;  // to each value

  bool operator==(const TensorStorage&) const = default;
};

// Where one tensor lies. The range is inside its file and fits dtype and shape: a Checkpoint checks
// before it lists.
struct TensorEntry {
  std::string name;
  [[no_unique_address]] TensorShape shape;
  DType dtype = DType::kF32;
  uint8_t storage_idx = 0;  // into the Checkpoint's storages; 0: as the model has it
  int32_t file_idx = 0;     // into Checkpoint::files()
  int64_t offset = 0;       // bytes from the start of the file
  int64_t num_bytes = 0;
};
// The shortest entry of a safetensors header has 50 bytes, and a hostile one may hold millions: the
// list must not take more than twice the file's.
static_assert(sizeof(TensorEntry) <= 96);

// "float32 [2, 64]", for messages, of a tensor without blocks.
std::string describe(const TensorEntry& entry);

class Checkpoint {
 public:
  // `tensors` in any order; throws CorruptFile if a name comes twice. The first of `storages` is
  // the plain one.
  Checkpoint(std::string_view format, std::string path, JsonDocument config,
             std::vector<std::shared_ptr<const MappedFile>> files, std::vector<TensorEntry> tensors,
             std::vector<TensorStorage> storages = {{}});

  // The registry's name of the format.
  std::string_view format() const { return format_; }
  // The directory or file, as the user gave it.
  const std::string& path() const { return path_; }
  // The model's description, with the fields of Hugging Face's config.json.
  const JsonDocument& config() const { return config_; }
  // What open_checkpoint took in the place of config.json, for who opens the same model anew.
  const std::string& config_text() const { return config_text_; }
  void set_config_text(std::string text) { config_text_ = std::move(text); }
  // How the weights were quantized, as config.json or a file beside it says; none if they were not.
  const std::optional<JsonDocument>& quantization() const { return quantization_; }
  void set_quantization(std::optional<JsonDocument> document) {
    quantization_ = std::move(document);
  }
  std::span<const std::shared_ptr<const MappedFile>> files() const { return files_; }
  // Sorted by name.
  std::span<const TensorEntry> tensors() const { return tensors_; }
  // For another checkpoint of the same files: a hostile list is too long to be copied.
  std::vector<TensorEntry> take_tensors() && { return std::move(tensors_); }
  // False for a config.json by itself, which is enough to plan with.
  bool has_tensors() const { return !files_.empty(); }
  // nullptr if there is none.
  const TensorEntry* find(std::string_view name) const;

  const TensorStorage& storage(const TensorEntry& entry) const {
    return storages_[entry.storage_idx];
  }
  // "float32", "Q4_K".
  std::string_view storage_name(const TensorEntry& entry) const;
  // "Q4_K [2, 256]", for messages.
  std::string describe(const TensorEntry& entry) const;

  // The tensor in the mapping, as stored; it may be unaligned. At most kMaxRank dimensions, else
  // NotSupported. Not for blocks.
  ConstTensor view(const TensorEntry& entry) const;
  const std::shared_ptr<const MappedFile>& file(const TensorEntry& entry) const {
    return files_[entry.file_idx];
  }

 private:
  std::string_view format_;
  std::string path_;
  JsonDocument config_;
  std::string config_text_;
  std::optional<JsonDocument> quantization_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<TensorEntry> tensors_;
  std::vector<TensorStorage> storages_;
};

// One row a format: the only place that lists them.
struct CheckpointFormatRow {
  std::string_view name;
  std::string_view summary;
  bool (*detect)(const CheckpointDirectory&);
  Checkpoint (*open)(const CheckpointDirectory&);
};
std::span<const CheckpointFormatRow> checkpoint_format_registry();

// Opens a checkpoint directory, or a file with weights, in the first format that is detected. Reads
// headers only. Throws InvalidArgument (no directory), NotSupported (no known format; says why and
// what to do), CorruptFile (file, field or byte, reason). `config_text`, if not empty, is read in
// the place of a config.json: NotSupported for a format that has none.
Checkpoint open_checkpoint(const std::string& path, std::string config_text = {});

// A config.json by itself, as a checkpoint of format "config" without tensors. Throws
// InvalidArgument (no such file), CorruptFile.
Checkpoint open_config(const std::string& path);

}  // namespace llmserve
