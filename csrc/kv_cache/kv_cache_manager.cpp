#include "kv_cache/kv_cache_manager.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {
namespace {

const CacheConfig& validated(const CacheConfig& config) {
  config.validate();
  return config;
}

}  // namespace

KvCacheManager::KvCacheManager(const CacheConfig& config, Hasher hasher)
    : config_(validated(config)),
      hasher_(hasher),
      allocator_(config.num_blocks),
      prefix_cache_(config.num_blocks, config.block_size) {}

void KvCacheManager::hash_blocks(BlockTable& table, std::span<const int32_t> token_ids,
                                 int64_t count) const {
  while (static_cast<int64_t>(table.hashes.size()) < count) {
    const TokenHash& parent = table.hashes.empty() ? table.root : table.hashes.back();
    table.hashes.push_back(hasher_(parent, block_tokens(token_ids, table.hashes.size())));
  }
}

PrefixMatch KvCacheManager::find_prefix(BlockTable& table,
                                        std::span<const int32_t> token_ids) const {
  PrefixMatch match;
  if (!config_.enable_prefix_caching) return match;
  // The block that it was seen waiting for is still under way: no need to walk the chain again.
  if (table.waits_for >= 0) {
    const auto announced = announced_.find(table.hashes[table.waits_for]);
    if (announced != announced_.end()) return {.blocks = {}, .pending = announced->second};
    table.waits_for = -1;
  }
  const int64_t num_tokens = static_cast<int64_t>(token_ids.size());
  const int64_t num_usable = (num_tokens - 1) / block_size();
  hash_blocks(table, token_ids, num_tokens / block_size());
  for (int64_t i = 0; i < num_usable; ++i) {
    const int32_t parent = i == 0 ? PrefixCache::kNone : match.blocks.back();
    const auto block = prefix_cache_.find(table.hashes[i], parent, block_tokens(token_ids, i));
    if (!block) {
      const auto announced = announced_.find(table.hashes[i]);
      if (announced == announced_.end()) break;
      match.pending = announced->second;
      table.waits_for = static_cast<int32_t>(i);
      break;
    }
    match.blocks.push_back(*block);
  }
  return match;
}

PrefixMatch KvCacheManager::skip_prefix(BlockTable& table,
                                        std::span<const int32_t> token_ids) const {
  if (config_.enable_prefix_caching && !table.is_private)
    hash_blocks(table, token_ids, static_cast<int64_t>(token_ids.size()) / block_size());
  return {};
}

int32_t KvCacheManager::num_lacking(const PrefixMatch& match, int64_t num_tokens) const {
  // A matched block that nobody refers to counts as available until it is attached.
  const auto num_revived = std::ranges::count_if(
      match.blocks, [&](int32_t block) { return allocator_.ref_count(block) == 0; });
  const int64_t num_new = num_blocks_for(num_tokens) - static_cast<int64_t>(match.blocks.size());
  return static_cast<int32_t>(std::max<int64_t>(0, num_new + num_revived - num_available()));
}

void KvCacheManager::attach(BlockTable& table, const PrefixMatch& match,
                            std::span<const int32_t> token_ids) {
  check_internal(table.blocks.empty(), "a prefix is attached to a table without blocks");
  for (const int32_t block : match.blocks) add_ref(block);
  table.blocks = match.blocks;
  if (!config_.enable_prefix_caching || table.is_private) return;
  table.num_cached = static_cast<int32_t>(match.blocks.size());
  table.num_announced = static_cast<int32_t>(token_ids.size() / block_size());
  for (int32_t i = table.num_cached; i < table.num_announced; ++i) {
    announced_.try_emplace(table.hashes[i], &table);
  }
}

void KvCacheManager::count_query(int64_t num_tokens, int64_t num_hit_tokens) {
  if (!config_.enable_prefix_caching) return;
  counters_.num_queries += num_tokens;
  counters_.num_hits += num_hit_tokens;
}

int32_t KvCacheManager::num_needed(const BlockTable& table, int64_t start,
                                   int64_t num_new_tokens) const {
  const int32_t num_held = static_cast<int32_t>(table.blocks.size());
  int32_t num_needed = std::max(0, num_blocks_for(start + num_new_tokens) - num_held);
  for (int64_t i = start / block_size(); i < num_held; ++i) {
    if (allocator_.ref_count(table.blocks[i]) > 1) ++num_needed;
  }
  return num_needed;
}

void KvCacheManager::allocate(BlockTable& table, int64_t start, int64_t num_new_tokens,
                              std::vector<BlockCopy>& copies) {
  check_internal(can_allocate(table, start, num_new_tokens), "blocks are allocated where they fit");
  for (size_t i = start / block_size(); i < table.blocks.size(); ++i) {
    if (allocator_.ref_count(table.blocks[i]) == 1) continue;
    const int32_t copy = take_block();
    copies.push_back({.source = table.blocks[i], .destination = copy});
    drop_ref(table.blocks[i]);
    table.blocks[i] = copy;
  }
  const size_t num_blocks = num_blocks_for(start + num_new_tokens);
  while (table.blocks.size() < num_blocks) table.blocks.push_back(take_block());
}

void KvCacheManager::commit(BlockTable& table, std::span<const int32_t> token_ids,
                            int64_t num_computed) {
  const int64_t num_full = num_computed / block_size();
  if (!config_.enable_prefix_caching || table.is_private || !table.is_cacheable) return;
  if (num_full == table.num_cached) return;
  hash_blocks(table, token_ids, num_full);
  for (int64_t i = table.num_cached; i < num_full; ++i) {
    if (!cache_block(table, token_ids, i)) {
      // Another chain of tokens has this hash. What follows would hang on the wrong parent.
      withdraw_all(table);
      table.is_cacheable = false;
      return;
    }
    withdraw(table, i);
    table.num_cached = static_cast<int32_t>(i + 1);
  }
}

bool KvCacheManager::cache_block(BlockTable& table, std::span<const int32_t> token_ids,
                                 int64_t idx) {
  const TokenHash& hash = table.hashes[idx];
  const std::span<const int32_t> tokens = block_tokens(token_ids, idx);
  const int32_t parent = idx == 0 ? PrefixCache::kNone : table.blocks[idx - 1];
  if (!prefix_cache_.contains(hash)) {
    prefix_cache_.insert(hash, table.blocks[idx], parent, tokens);
    return true;
  }
  const auto equal = prefix_cache_.find(hash, parent, tokens);
  if (!equal) return false;
  add_ref(*equal);
  drop_ref(table.blocks[idx]);
  table.blocks[idx] = *equal;
  return true;
}

void KvCacheManager::fork(const BlockTable& parent, BlockTable& child) {
  check_internal(child.blocks.empty(), "a fork starts without blocks");
  for (const int32_t block : parent.blocks) add_ref(block);
  child = parent;
  child.num_announced = child.num_cached;
}

void KvCacheManager::release(BlockTable& table) {
  withdraw_all(table);
  // Children before parents: PrefixCache evicts in this order.
  for (size_t i = table.blocks.size(); i-- > 0;) drop_ref(table.blocks[i]);
  table.blocks.clear();
  table.num_cached = table.num_announced = 0;
  table.waits_for = -1;
  table.is_cacheable = true;
}

void KvCacheManager::reset_prefix_cache(std::span<BlockTable* const> tables) {
  for (BlockTable* table : tables) {
    withdraw_all(*table);
    table->num_cached = table->num_announced = 0;
    table->is_cacheable = false;
  }
  for (const int32_t block : prefix_cache_.clear()) allocator_.recycle(block);
}

int32_t KvCacheManager::take_block() {
  if (!allocator_.can_allocate(1)) {
    allocator_.recycle(prefix_cache_.evict());
    ++counters_.num_evictions;
  }
  return allocator_.allocate();
}

void KvCacheManager::add_ref(int32_t block) {
  if (allocator_.ref_count(block) == 0) prefix_cache_.remove_evictable(block);
  allocator_.add_ref(block);
}

void KvCacheManager::drop_ref(int32_t block) {
  if (allocator_.release(block) > 0) return;
  if (prefix_cache_.holds(block)) {
    prefix_cache_.add_evictable(block);
  } else {
    allocator_.recycle(block);
  }
}

void KvCacheManager::withdraw(BlockTable& table, int64_t idx) {
  if (idx >= table.num_announced) return;
  const auto announced = announced_.find(table.hashes[idx]);
  if (announced != announced_.end() && announced->second == &table) announced_.erase(announced);
}

void KvCacheManager::withdraw_all(BlockTable& table) {
  for (int64_t i = table.num_cached; i < table.num_announced; ++i) withdraw(table, i);
  table.num_announced = table.num_cached;
}

void KvCacheManager::check_integrity(std::span<const BlockTable* const> tables) const {
  std::vector<int32_t> num_holders(num_blocks(), 0);
  size_t num_announced = 0;
  for (const BlockTable* table : tables) {
    for (size_t i = 0; i < table->blocks.size(); ++i) {
      ++num_holders[table->blocks[i]];
      if (i < static_cast<size_t>(table->num_cached)) {
        check_internal(prefix_cache_.holds(table->blocks[i]),
                       "the cached blocks of a table are in the prefix cache");
      }
    }
    for (int64_t i = table->num_cached; i < table->num_announced; ++i) {
      const auto announced = announced_.find(table->hashes[i]);
      if (announced != announced_.end() && announced->second == table) ++num_announced;
    }
  }
  check_internal(num_announced == announced_.size(), "each announced block has a table");
  int32_t num_referenced = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    check_block(block, num_holders[block]);
    if (num_holders[block] > 0) ++num_referenced;
  }
  check_internal(num_free_blocks() + num_cached_blocks() + num_referenced == num_blocks(),
                 "free + cached + referenced blocks = total");
  prefix_cache_.check_integrity();
}

void KvCacheManager::check_block(int32_t block, int32_t num_holders) const {
  check_internal(allocator_.ref_count(block) == num_holders,
                 "a block's reference count is the number of its holders");
  check_internal(!allocator_.is_free(block) || (num_holders == 0 && !prefix_cache_.holds(block)),
                 "a free block is neither referenced nor cached");
  check_internal(allocator_.is_free(block) || num_holders > 0 || prefix_cache_.holds(block),
                 "a block that is not free is referenced or cached");
}

}  // namespace llmserve
