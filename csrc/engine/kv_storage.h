// The memory of the KV cache: one keys and one values pool a lane, and the states of layers that
// have any. The layers of a lane, one of each cache group, share its pools:
// their block tables name different blocks.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace llmserve {

// The rows of ranks, threads of one process, that keep them together: the first that asks takes the
// memory, and it goes with the last that has it.
class SharedKvRows {
 public:
  explicit SharedKvRows(int32_t num_ranks) : num_ranks_(num_ranks) {}

  int32_t num_ranks() const { return num_ranks_; }
  // All ask for as much. Any thread. Throws ResourceExhausted.
  std::shared_ptr<Buffer> take(int64_t num_bytes, Memory& memory);

 private:
  const int32_t num_ranks_;
  std::mutex mutex_;  // guards what follows
  std::weak_ptr<Buffer> rows_;
};

// Who keeps its rows with others, and which of them it is.
struct KvSharing {
  std::shared_ptr<SharedKvRows> rows;  // null: it keeps them alone
  int32_t rank = 0;
};

class KvStorage {
 public:
  // Blocks, and what they hold.
  struct Shape {
    int64_t num_blocks = 0;
    int64_t block_size = 16;  // tokens
    DType dtype = DType::kF32;
    int64_t num_state_slots = 0;
  };
  // Zero-filled, in the backend's memory and with the key layout that it reads fastest. Throws
  // ResourceExhausted.
  KvStorage(std::span<const CacheGroupSpec> groups, std::span<const KvPlace> places,
            const Shape& shape, Backend& backend, const KvSharing& sharing = {});

  std::span<const PagedKvCache> layers() const { return layers_; }
  // [lanes] whole blocks: a group's layer i is in lane i.
  std::span<const PagedKvCache> lanes() const { return lanes_; }
  // [layers] u8 [num_state_slots, bytes of a state], or none.
  std::span<const Tensor> states() const { return states_; }
  // Of rows that are kept with others, this one's part.
  int64_t num_bytes() const;
  int64_t block_bytes() const;  // of all lanes

  // Has some of the first num_blocks blocks at hand that were not yet, a few large pages of them,
  // on the threads of the backend; false if there are none, or memory that is not given so. The
  // system clears pages when they are first written to, and a virtual machine may have to get them
  // from its host: a step should not wait for that. Of rows that are kept with others, this one has
  // every so many large pages at hand, which are then on its memory node.
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
  bool touch(Memory& memory, Pool& pool, int64_t num_blocks, int64_t num_bytes) const;

  int32_t rank_ = 0;
  int32_t num_ranks_ = 1;  // that keep the rows
  std::shared_ptr<Buffer> rows_;
  Buffer kept_states_;
  std::vector<Pool> pools_;
  std::vector<PagedKvCache> lanes_;   // as whole blocks, to be copied
  std::vector<PagedKvCache> layers_;  // [layers], each its lane as ops take it
  std::vector<Tensor> states_;        // [layers]
};

}  // namespace llmserve
