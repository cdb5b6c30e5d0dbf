// The memory of the paged KV cache: one keys and one values pool a lane, in one allocation. The
// layers of a lane, one of each cache group, share it: their block tables name different blocks.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace llmserve {

class KvStorage {
 public:
  // Zero-filled, num_blocks blocks of block_size tokens in every lane, in the backend's memory and
  // with the key layout that it reads fastest. Throws ResourceExhausted.
  KvStorage(std::span<const KvLayerSpec> layers, int64_t num_blocks, int64_t block_size,
            DType dtype, Backend& backend);

  std::span<const PagedKvCache> layers() const { return layers_; }
  int64_t num_bytes() const { return buffer_.num_bytes(); }

  // Copies whole blocks (source, destination) in every lane, in the given order.
  void copy_blocks(Backend& backend, std::span<const std::pair<int32_t, int32_t>> pairs) const;

 private:
  Buffer buffer_;
  std::vector<PagedKvCache> lanes_;
  std::vector<PagedKvCache> layers_;  // [layers], each its lane
};

}  // namespace llmserve
