// Weights in the layout that a backend runs on, in a file: the next start maps it in place of
// packing again.
//
// A safetensors file. Each packed weight is a tensor of bytes (U8), from a page boundary on; the
// metadata are the key, a checksum of all bytes, and what people want to know of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/mapped_file.h"

namespace llmserve {

// Runs work(begin, end) over ranges of [0, count), on as many threads as there are.
using RunOnThreads =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& work)>;

// A weight's bytes, whose owner keeps them where they are.
struct PackedTensor {
  std::string name;
  std::span<const std::byte> bytes;
};

// Whose weights, in which form, and made from what.
struct PackedKey {
  std::string model;    // path of the checkpoint
  std::string files;    // names of those of its weights; a folder may hold several checkpoints
  std::string variant;  // "bfloat16 in cpu panels 2"
  std::string content;  // hexadecimal
};

// The key of a checkpoint's weights. The content is a hash of the files' sizes and times of change,
// of each tensor's name, type, shape and place, and of bytes from its beginning, middle and end:
// checkpoints that agree in all of these are taken for the same.
PackedKey packed_key(const Checkpoint& checkpoint, const std::string& variant);

class PackedFile {
 public:
  // Reads the header. Throws CorruptFile if it is none, or of another key's content: the checkpoint
  // has changed since.
  PackedFile(std::shared_ptr<const MappedFile> file, const PackedKey& key);
  // Reads all bytes once. Throws CorruptFile unless they are those that were written.
  void check(const RunOnThreads& run) const;

  // The weight of that name and size; empty if there is none.
  std::span<const std::byte> find(const std::string& name, int64_t num_bytes) const;
  const std::shared_ptr<const MappedFile>& file() const { return file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorEntry> tensors_;
};

// What the file's metadata say; throws CorruptFile.
PackedKey read_packed_key(const MappedFile& file);

// The bytes before those of the tensors.
std::string packed_header(const PackedKey& key, std::span<const PackedTensor> tensors,
                          const RunOnThreads& run);

}  // namespace llmserve
