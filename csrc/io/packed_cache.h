// The user's cache folder of packed weights (packed_file.h).
//
// A file is named after the model and a hash of its path and variant. It is written beside under
// another name and renamed when it is whole, so that a reader sees all of it or nothing, and of two
// writers the last one wins. The time of its last use is the file's modification time.
//
// Nothing that goes wrong here stops a load: it is said in a warning, and the weights are packed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/packed_file.h"

namespace llmserve {

struct PackedCacheEntry {
  std::string path;
  std::string model;    // empty, like variant, where the file cannot be read
  std::string variant;  // PackedKey
  int64_t num_bytes = 0;
  int64_t last_used_ns = 0;  // since 1970
};

class PackedCache {
 public:
  // The folder need not be there yet. Files beyond `quota_bytes` in all are not kept.
  explicit PackedCache(std::filesystem::path folder, int64_t quota_bytes = 0)
      : folder_(std::move(folder)), quota_bytes_(quota_bytes) {}

  // The key's file; null if there is none. One that is damaged, or that the checkpoint has changed
  // since, counts as none and leaves a warning. Without `run` only its header is looked at.
  std::unique_ptr<PackedFile> find(const PackedKey& key, const RunOnThreads& run,
                                   std::string& warning) const;
  // Writes the key's file, once those that were not used for longest have made room.
  void store(const PackedKey& key, std::span<const PackedTensor> tensors, const RunOnThreads& run,
             std::string& warning) const;

  // The least recently used first.
  std::vector<PackedCacheEntry> list() const;
  // Removes all files, and what writers left that were killed; returns how many bytes. An engine
  // that has a file mapped keeps it until it ends.
  int64_t clear() const;

 private:
  std::filesystem::path path_of(const PackedKey& key) const;
  int64_t remove_abandoned() const;
  void make_room(int64_t num_bytes) const;

  std::filesystem::path folder_;
  int64_t quota_bytes_;
};

}  // namespace llmserve
