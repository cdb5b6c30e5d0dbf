// The arithmetic of cache groups: how many blocks of the pool a sequence holds, and how blocks of
// several groups hang together. A group with a window keeps the blocks that the next token looks
// at, and gives back those before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "core/cache_group.h"
#include "core/token_hash.h"
#include "kv_cache/block_table.h"

namespace llmserve {

// The first block that the token at position num_tokens looks at; those before are not needed.
inline int64_t first_needed_block(const CacheGroupSpec& group, int64_t num_tokens,
                                  int64_t block_size) {
  if (group.keeps_all()) return 0;
  return std::max<int64_t>(0, num_tokens - group.window + 1) / block_size;
}

// Blocks that a sequence holds at most at any time on its way to num_tokens tokens, of which a step
// runs up to max_step_tokens: with a window, those of a step and of what its first token sees.
inline int64_t max_blocks_held(const CacheGroupSpec& group, int64_t num_tokens, int64_t block_size,
                               int64_t max_step_tokens) {
  const int64_t all = (num_tokens + block_size - 1) / block_size;
  if (group.keeps_all() || max_step_tokens >= num_tokens) return all;
  // A range of tokens that begins anywhere in a block.
  const int64_t length = group.window - 1 + max_step_tokens;
  return std::min(all, (length + block_size - 2) / block_size + 1);
}

// In all groups together.
inline int64_t max_blocks_held(std::span<const CacheGroupSpec> groups, int64_t num_tokens,
                               int64_t block_size, int64_t max_step_tokens) {
  int64_t sum = 0;
  for (const CacheGroupSpec& group : groups)
    sum += max_blocks_held(group, num_tokens, block_size, max_step_tokens);
  return sum;
}

// The groups of one cache that keep rows, which never change.
class CacheGroups {
 public:
  CacheGroups(std::span<const CacheGroupSpec> specs, int32_t block_size);

  int64_t count() const { return std::ssize(specs_); }
  int32_t block_size() const { return block_size_; }
  std::span<const CacheGroupSpec> specs() const { return specs_; }
  bool keeps_all(int64_t group) const { return specs_[group].keeps_all(); }
  // Those that keep all tokens, then those with a window: what hangs on a block finds it there.
  std::span<const int64_t> in_order() const { return order_; }
  int64_t first_needed(int64_t group, int64_t num_tokens) const {
    return first_needed_block(specs_[group], num_tokens, block_size_);
  }

  // One chain names a block in every group: what an index knows the group's by.
  static TokenHash key_of(const TokenHash& hash, int64_t group);
  // What an index hangs a block on: its predecessor. A windowed group loses that; its block hangs
  // on the block of the same tokens in the first group that keeps all, so that all tokens before it
  // are compared there, and it goes first. Without such a group it hangs on none, and the tokens
  // before its own are known by the hash alone: see docs/memory-plan.md.
  int32_t parent_of(int64_t group, int64_t idx, const GroupBlocks& blocks) const;
  // Whether that is among `blocks`, or there is none to look for.
  bool has_parent(int64_t group, int64_t idx, const GroupBlocks& blocks) const {
    if (keeps_all(group)) return idx == 0 || blocks[group][idx - 1] != kGone;
    return !keeps_all(order_.front()) || blocks[order_.front()][idx] != kGone;
  }

 private:
  const std::vector<CacheGroupSpec> specs_;
  const int32_t block_size_;
  std::vector<int64_t> order_;
};

}  // namespace llmserve
