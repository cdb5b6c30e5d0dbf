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

  // Has some of the first num_blocks blocks at hand that were not yet, a few large pages of them,
  // on the threads of the backend; false if there are none, or memory that is not given so. The
  // system clears pages when they are first written to, and a virtual machine may have to get them
  // from its host: a step should not wait for that.
  bool touch(Backend& backend, int64_t num_blocks);
  // Has all of them at hand: for a step that is about to write to them. In its ops one thread would
  // wait while another has a large page cleared.
  void touch_all(Backend& backend, int64_t num_blocks);

  // Copies whole blocks (source, destination) in every lane, in the given order.
  void copy_blocks(Backend& backend, std::span<const std::pair<int32_t, int32_t>> pairs) const;

 private:
  // Keys or values of a lane: as many bytes of it are at hand.
  struct Pool {
    std::byte* data;
    int64_t block_bytes;
    int64_t touched_bytes = 0;
  };
  // Up to num_bytes more of a pool's first num_blocks blocks; false if there are no more, or it
  // fails.
  static bool touch(Memory& memory, Pool& pool, int64_t num_blocks, int64_t num_bytes);

  Buffer buffer_;
  std::vector<Pool> pools_;
  std::vector<PagedKvCache> lanes_;
  std::vector<PagedKvCache> layers_;  // [layers], each its lane
};

}  // namespace llmserve
