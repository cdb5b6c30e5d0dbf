// What a lower tier holds, by what it holds: an index of its own, since a block that is there has
// no block of the KV pool.
//
// Its places are slots, each of the size of a block. A slot is free; stored (in the index, evicted
// when it was the longest time not used and nobody refers to it); or on the way: storing, in the
// index and not to be read yet. Block tables refer to the slots of their own blocks, transfers to
// what they read or write, as with the blocks of the pool.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache/block_pool.h"

namespace llmserve {

class TierIndex {
 public:
  TierIndex(int32_t num_slots, int32_t block_size)
      : slots_(num_slots, block_size), is_stored_(num_slots, false) {}

  const BlockPool& slots() const { return slots_; }
  const PrefixCache& entries() const { return slots_.prefix_cache(); }
  // [slots] for those in the index: whether their contents have arrived.
  const std::vector<bool>& is_stored() const { return is_stored_; }

  void add_ref(int32_t slot) { slots_.add_ref(slot); }
  void drop_ref(int32_t slot) { slots_.drop_ref(slot); }
  void drop_refs(const GroupBlocks& slots, std::span<const int64_t> order) {
    slots_.drop_refs(slots, order);
  }

  // Takes a slot with one reference, under PrefixCache's key, parent and tokens, for contents that
  // are on their way. Precondition: a slot is available, and the key is new.
  int32_t begin_store(const TokenHash& key, int32_t parent, std::span<const int32_t> token_ids,
                      bool is_told) {
    const int32_t slot = slots_.take();
    is_stored_[slot] = false;
    slots_.insert(key, slot, parent, token_ids, is_told);
    return slot;
  }
  void finish_store(int32_t slot) { is_stored_[slot] = true; }
  // Nobody finds it any more, nor what hangs on it; whoever refers to it keeps the slot.
  void unlink(int32_t slot) { slots_.remove(slot); }
  void clear() { slots_.clear(); }
  // PrefixCache::tell.
  void tell(std::vector<BlockEvent>* events, const PrefixCache* beside) {
    slots_.tell(events, beside);
  }

 private:
  BlockPool slots_;
  std::vector<bool> is_stored_;
};

}  // namespace llmserve
