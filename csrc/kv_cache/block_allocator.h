// A free list and reference counts over the blocks of the KV pool; no policy.
//
//   free --allocate()--> referenced (1) --add_ref()/release()--> 0 references --recycle()--> free
//
// A block with no reference that was not recycled is someone's cache entry; add_ref() brings it
// back.
#pragma once

#include <cstdint>
#include <vector>

#include "core/prefetch.h"

namespace llmserve {

class BlockAllocator {
 public:
  // Blocks are numbered 0 .. num_blocks - 1.
  explicit BlockAllocator(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t ref_count(int32_t block) const { return ref_counts_[block]; }
  void prefetch(int32_t block) const { llmserve::prefetch(ref_counts_[block]); }
  bool is_free(int32_t block) const { return is_free_[block]; }

  bool can_allocate(int32_t count) const { return count <= num_free(); }
  // A free block, with one reference. InternalError when there is none. The block that was freed
  // last comes first: its memory is the warmest.
  int32_t allocate();
  void add_ref(int32_t block);
  // Takes one reference away and returns how many are left.
  int32_t release(int32_t block);
  // Puts a block without references on the free list.
  void recycle(int32_t block);

 private:
  std::vector<int32_t> free_;        // a stack
  std::vector<int32_t> ref_counts_;  // [N]
  std::vector<bool> is_free_;        // [N]
};

}  // namespace llmserve
