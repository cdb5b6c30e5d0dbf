#include "kv_cache/block_allocator.h"

#include "core/error.h"

namespace llmserve {

BlockAllocator::BlockAllocator(int32_t num_blocks)
    : ref_counts_(num_blocks, 0), is_free_(num_blocks, true) {
  free_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

int32_t BlockAllocator::allocate() {
  check_internal(!free_.empty(), "a block is allocated only while one is free");
  const int32_t block = free_.back();
  free_.pop_back();
  is_free_[block] = false;
  ref_counts_[block] = 1;
  return block;
}

void BlockAllocator::add_ref(int32_t block) {
  check_internal(!is_free_[block], "a free block is not referred to");
  ++ref_counts_[block];
}

int32_t BlockAllocator::release(int32_t block) {
  check_internal(ref_counts_[block] > 0, "a released block has a reference");
  return --ref_counts_[block];
}

void BlockAllocator::recycle(int32_t block) {
  check_internal(ref_counts_[block] == 0 && !is_free_[block],
                 "a recycled block has no reference and is not free");
  is_free_[block] = true;
  free_.push_back(block);
}

}  // namespace llmserve
