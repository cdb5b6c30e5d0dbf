// GGUF, versions 2 and 3 (ggml, docs/gguf.md): a header, typed metadata, a list of tensors,
// padding, the tensors' bytes. The file is untrusted: every count, length and offset is checked
// against its size before it is used, and nothing is kept but views into the mapping.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/checkpoint.h"
#include "io/mapped_file.h"
#include "quant/quant_format.h"

namespace llmserve {

enum class GgufType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};
std::string_view name(GgufType type);

// One entry of the metadata: a scalar, or the elements of an array.
struct GgufValue {
  std::string_view key;
  GgufType type = GgufType::kU8;  // kArray: elements that are arrays themselves, which no one reads
  bool is_array = false;
  int64_t count = 1;
  int64_t offset = 0;  // of the first element, from the start of the file
};

struct GgufTensor {
  std::string_view name;
  const QuantFormat* format = nullptr;  // none: integers, of `dtype`
  DType dtype = DType::kU8;             // of plain elements
  int rank = 0;
  std::array<int64_t, 4> shape{};  // row-major: the file's dimensions backwards
  int64_t offset = 0;              // from the start of the file
  int64_t num_bytes = 0;
};

class GgufFile {
 public:
  // Reads and checks all of the header. Throws CorruptFile (path, byte, reason), or NotSupported:
  // version 1, another byte order, a tensor type that is not read.
  explicit GgufFile(std::shared_ptr<const MappedFile> file);

  const std::shared_ptr<const MappedFile>& file() const { return file_; }
  uint32_t version() const { return version_; }
  std::span<const GgufValue> metadata() const { return metadata_; }  // in the file's order
  std::span<const GgufTensor> tensors() const { return tensors_; }   // in the file's order
  // nullptr if there is none.
  const GgufValue* find(std::string_view key) const;
  const GgufTensor* find_tensor(std::string_view name) const;

  // An element of a value, 0 of a scalar. Each throws CorruptFile, naming the key, on another type
  // or a number that is out of range.
  bool boolean(const GgufValue& value, int64_t idx = 0) const;
  int64_t integer(const GgufValue& value, int64_t idx = 0) const;
  double number(const GgufValue& value, int64_t idx = 0) const;  // finite
  std::string_view string(const GgufValue& value) const;         // a scalar's bytes
  // Calls fn(std::string_view) for each string of an array.
  template <class Fn>
  void for_each_string(const GgufValue& value, Fn&& fn) const {
    check_strings(value);
    int64_t at = value.offset;
    for (int64_t i = 0; i < value.count; ++i) {
      const std::string_view text = string_at(at);
      at += 8 + static_cast<int64_t>(text.size());
      fn(text);
    }
  }

  // Throws CorruptFile "<path>: metadata <key>: <reason>".
  [[noreturn]] void fail(std::string_view key, std::string_view reason) const;

 private:
  void check_strings(const GgufValue& value) const;
  std::string_view string_at(int64_t offset) const;

  std::shared_ptr<const MappedFile> file_;
  uint32_t version_ = 0;
  std::vector<GgufValue> metadata_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> keys_;
};

// A GGUF file, or the first of a split one. `path` as in open_checkpoint.
GgufFile open_gguf_file(const std::string& path);

// A path to a .gguf file, or a directory with no other weights than one of them. A model that is
// split (…-00001-of-00003.gguf) is opened by its first file.
bool is_gguf(const CheckpointDirectory& directory);
Checkpoint open_gguf(const CheckpointDirectory& directory);

}  // namespace llmserve
