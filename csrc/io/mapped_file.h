// A file of a checkpoint, mapped read-only, and the one function that opens such files.
//
// A checkpoint is untrusted: its names must not lead elsewhere. A name is a plain file name. What
// it resolves to lies in the checkpoint's directory; or, where that directory is a snapshot of the
// Hugging Face hub's cache (…/snapshots/<revision>, whose files are links to …/blobs/<hash>), in
// the blobs beside it. Nothing else is opened, and only regular files are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/bus_errors.h"

namespace llmserve {

// The file must not be overwritten or shortened while it is mapped (replacing it by a rename is
// fine). Reads past a new end give zeros, and read_state() says so from then on.
class MappedFile {
 public:
  struct Times {
    int64_t modified_ns = 0;  // the content; since 1970
    int64_t changed_ns = 0;   // content, name or owner
  };
  MappedFile(std::filesystem::path path, const std::byte* data, int64_t num_bytes)
      : MappedFile(std::move(path), data, num_bytes, Times()) {}
  MappedFile(std::filesystem::path path, const std::byte* data, int64_t num_bytes,
             const Times& times);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string name() const { return path_.filename().string(); }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(num_bytes_)}; }
  int64_t num_bytes() const { return num_bytes_; }
  const Times& times() const { return times_; }  // when it was opened
  std::string_view text() const;
  // Whoever uses bytes of the mapping checks it afterwards.
  const std::shared_ptr<const ReadState>& read_state() const { return read_state_; }

  // Brings a range into memory by one call, where reading it would take a fault every few pages.
  void fetch(int64_t offset, int64_t num_bytes) const;

  // Lets go of the memory behind a range; a later read fetches it from the file again.
  void release(int64_t offset, int64_t num_bytes) const;

 private:
  void advise(int64_t offset, int64_t num_bytes, int advice) const;

  std::filesystem::path path_;
  const std::byte* data_;
  int64_t num_bytes_;
  Times times_;
  std::shared_ptr<const ReadState> read_state_;
  std::optional<BusErrorGuard> guard_;  // none of an empty file
};

class CheckpointDirectory {
 public:
  // Throws InvalidArgument unless `path` is a directory that can be read, or a .safetensors or
  // .gguf file in one, which is then weights_file(). `config_text` stands in for its config.json.
  explicit CheckpointDirectory(const std::string& path, std::string config_text = {});

  const std::filesystem::path& path() const { return path_; }
  // The one file that the caller wants the weights from; empty where the directory is to say.
  const std::string& weights_file() const { return weights_file_; }
  // Empty where config.json is to say.
  const std::string& config_text() const { return config_text_; }

  // Whether something of that plain name is there.
  bool contains(std::string_view name) const;
  // Names of the files, sorted.
  std::vector<std::string> list() const;

  // Throws CorruptFile: no such file, not a regular file, or a name or link that leaves the
  // directory. Shared, because tensors that are read in place outlive their checkpoint.
  std::shared_ptr<const MappedFile> map(std::string_view name) const;

 private:
  std::filesystem::path path_;       // as given, for messages
  std::filesystem::path canonical_;  // links resolved
  std::string weights_file_;
  std::string config_text_;
};

}  // namespace llmserve
