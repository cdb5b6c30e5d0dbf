// A linear weight that runs on its rows in a file's mapping until somebody packs it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/mapped_file.h"
#include "kernels/backend.h"

namespace llmserve {

class DeferredWeight {
 public:
  explicit DeferredWeight(std::shared_ptr<LinearRows> rows) : rows_(std::move(rows)) {}

  // Where a part of the rows lies.
  void add_source(std::shared_ptr<const MappedFile> file, int64_t offset, int64_t num_bytes) {
    sources_.push_back({std::move(file), offset, num_bytes});
  }
  int64_t num_bytes() const { return rows_->packed.num_bytes(); }

  // Between two ops. Lets go of the file's pages.
  void pack(Backend& backend) {
    backend.pack_rows(*rows_);
    for (const Source& source : sources_) source.file->release(source.offset, source.num_bytes);
    sources_.clear();
  }

 private:
  struct Source {
    std::shared_ptr<const MappedFile> file;
    int64_t offset;
    int64_t num_bytes;
  };
  std::shared_ptr<LinearRows> rows_;
  std::vector<Source> sources_;
};

}  // namespace llmserve
