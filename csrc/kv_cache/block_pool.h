// Blocks of one memory: who refers to each, and what those hold that nobody refers to.
//
// Every block is in exactly one state: free; cached (in the prefix cache, no reference); or
// referenced. Cached blocks are evicted when the free list is empty, so that free + cached is what
// can be taken.
//
// Whoever refers to a block of the prefix cache refers to all that it hangs on, and lets go of the
// block first: see PrefixCache.
#pragma once

#include <cstdint>
#include <span>

#include "kv_cache/block_allocator.h"
#include "kv_cache/block_table.h"
#include "kv_cache/prefix_cache.h"

namespace llmserve {

class BlockPool {
 public:
  BlockPool(int32_t num_blocks, int32_t block_size)
      : allocator_(num_blocks), prefix_cache_(num_blocks, block_size) {}

  int32_t num_blocks() const { return allocator_.num_blocks(); }
  int32_t num_free() const { return allocator_.num_free(); }
  int32_t num_cached() const { return prefix_cache_.num_evictable(); }
  int32_t num_available() const { return num_free() + num_cached(); }
  int32_t ref_count(int32_t block) const { return allocator_.ref_count(block); }
  void prefetch(int32_t block) const { allocator_.prefetch(block); }
  int64_t num_evictions() const { return num_evictions_; }

  const PrefixCache& prefix_cache() const { return prefix_cache_; }
  // PrefixCache::insert of a block that is referred to.
  void insert(const TokenHash& key, int32_t block, int32_t parent,
              std::span<const int32_t> token_ids, bool is_told) {
    prefix_cache_.insert(key, block, parent, token_ids, is_told);
  }
  // PrefixCache::tell.
  void tell(std::vector<BlockEvent>* events, const PrefixCache* beside) {
    prefix_cache_.tell(events, beside);
  }

  // A block with one reference; evicts where none is free. Precondition: one is available.
  int32_t take();
  void add_ref(int32_t block);
  void drop_ref(int32_t block);
  // Of each group the references from the last block to the first, groups in the reverse of
  // `order`: children before parents.
  void drop_refs(const GroupBlocks& blocks, std::span<const int64_t> order);
  // Takes a block, and all that hangs on it, out of the prefix cache.
  void remove(int32_t block);
  // Empties the prefix cache.
  void clear();

  // Throws InternalError unless free + cached + referenced = total and each block has as many
  // references as holders [N].
  void check_integrity(std::span<const int32_t> num_holders) const;

 private:
  void check_block(int32_t block, int32_t num_holders) const;

  BlockAllocator allocator_;
  PrefixCache prefix_cache_;
  int64_t num_evictions_ = 0;
};

}  // namespace llmserve
