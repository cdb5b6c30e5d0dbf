#include "kv_cache/block_pool.h"

#include "core/error.h"

namespace llmserve {

int32_t BlockPool::take() {
  if (!allocator_.can_allocate(1)) {
    allocator_.recycle(prefix_cache_.evict());
    ++num_evictions_;
  }
  return allocator_.allocate();
}

void BlockPool::add_ref(int32_t block) {
  if (allocator_.ref_count(block) == 0) prefix_cache_.remove_evictable(block);
  allocator_.add_ref(block);
}

void BlockPool::drop_ref(int32_t block) {
  if (allocator_.release(block) > 0) return;
  if (prefix_cache_.holds(block)) {
    prefix_cache_.add_evictable(block);
  } else {
    allocator_.recycle(block);
  }
}

void BlockPool::drop_refs(const GroupBlocks& blocks, std::span<const int64_t> order) {
  if (blocks.empty()) return;
  for (size_t g = order.size(); g-- > 0;) {
    const std::vector<int32_t>& group = blocks[order[g]];
    for (size_t i = group.size(); i-- > 0;)
      if (group[i] != kGone) drop_ref(group[i]);
  }
}

void BlockPool::remove(int32_t block) {
  for (const int32_t removed : prefix_cache_.remove(block)) allocator_.recycle(removed);
}

void BlockPool::clear() {
  for (const int32_t block : prefix_cache_.clear()) allocator_.recycle(block);
}

void BlockPool::check_integrity(std::span<const int32_t> num_holders) const {
  int32_t num_referenced = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    check_block(block, num_holders[block]);
    if (num_holders[block] > 0) ++num_referenced;
  }
  check_internal(num_available() + num_referenced == num_blocks(),
                 "free + cached + referenced blocks = total");
  prefix_cache_.check_integrity();
}

void BlockPool::check_block(int32_t block, int32_t num_holders) const {
  check_internal(allocator_.ref_count(block) == num_holders,
                 "a block's reference count is the number of its holders");
  check_internal(!allocator_.is_free(block) || (num_holders == 0 && !prefix_cache_.holds(block)),
                 "a free block is neither referenced nor cached");
  check_internal(allocator_.is_free(block) || num_holders > 0 || prefix_cache_.holds(block),
                 "a block that is not free is referenced or cached");
}

}  // namespace llmserve
