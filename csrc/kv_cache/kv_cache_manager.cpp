#include "kv_cache/kv_cache_manager.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace llmserve {
namespace {

const CacheConfig& validated(const CacheConfig& config) {
  config.validate();
  return config;
}

// The first that keeps all tokens comes first: what hangs on its blocks finds them there.
std::vector<int64_t> order_of_groups(std::span<const int32_t> windows) {
  std::vector<int64_t> order(windows.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_partition(order, [&](int64_t group) { return windows[group] == 0; });
  return order;
}

}  // namespace

KvCacheManager::KvCacheManager(const CacheConfig& config, Hasher hasher, int64_t max_step_tokens)
    : config_(validated(config)),
      hasher_(hasher),
      max_step_tokens_(max_step_tokens),
      group_order_(order_of_groups(config_.windows)),
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
  match_blocks(table, token_ids, num_usable, match);
  if (match.num_blocks == num_usable) return match;
  const auto announced = announced_.find(table.hashes[match.num_blocks]);
  if (announced == announced_.end()) return match;
  match.pending = announced->second;
  table.waits_for = match.num_blocks;
  return match;
}

TokenHash KvCacheManager::key_of(const TokenHash& hash, int64_t group) {
  TokenHash key = hash;
  key.bytes[30] ^= static_cast<uint8_t>(group >> 8);
  key.bytes[31] ^= static_cast<uint8_t>(group);
  return key;
}

int32_t KvCacheManager::parent_of(int64_t group, int64_t idx,
                                  const std::vector<std::vector<int32_t>>& blocks) const {
  if (config_.windows[group] == 0) return idx == 0 ? PrefixCache::kNone : blocks[group][idx - 1];
  const int64_t first = group_order_.front();
  return config_.windows[first] == 0 ? blocks[first][idx] : PrefixCache::kNone;
}

std::optional<int32_t> KvCacheManager::find_block(
    const BlockTable& table, std::span<const int32_t> token_ids, int64_t group, int64_t idx,
    const std::vector<std::vector<int32_t>>& blocks) const {
  return prefix_cache_.find(key_of(table.hashes[idx], group), parent_of(group, idx, blocks),
                            block_tokens(token_ids, idx));
}

// The leading blocks, up to `count`, that a full group has.
int64_t KvCacheManager::match_full(const BlockTable& table, std::span<const int32_t> token_ids,
                                   int64_t group, int64_t count,
                                   std::vector<std::vector<int32_t>>& blocks) const {
  for (int64_t i = 0; i < count; ++i) {
    const auto block = find_block(table, token_ids, group, i, blocks);
    if (!block) break;
    blocks[group].push_back(*block);
  }
  return std::ssize(blocks[group]);
}

// The longest prefix, of up to `count` blocks, of which a windowed group has what the next token
// looks at. A missing block ends every prefix that would need it, so that each is looked up once.
int64_t KvCacheManager::match_window(const BlockTable& table, std::span<const int32_t> token_ids,
                                     int64_t group, int64_t count,
                                     const std::vector<std::vector<int32_t>>& blocks) const {
  while (count > 0) {
    const int64_t begin = first_needed(group, count * block_size());
    int64_t i = count - 1;
    while (i >= begin && find_block(table, token_ids, group, i, blocks)) --i;
    if (i < begin) break;
    count = i;
  }
  return count;
}

void KvCacheManager::match_blocks(const BlockTable& table, std::span<const int32_t> token_ids,
                                  int64_t count, PrefixMatch& match) const {
  match.blocks.resize(num_groups());
  for (int64_t g = 0; g < num_groups(); ++g)
    if (config_.windows[g] == 0) count = match_full(table, token_ids, g, count, match.blocks);
  // A shorter prefix may need blocks that another group has lost: until all agree.
  for (int64_t previous = -1; previous != count;) {
    previous = count;
    for (int64_t g = 0; g < num_groups(); ++g)
      if (config_.windows[g] > 0) count = match_window(table, token_ids, g, count, match.blocks);
  }
  match.num_blocks = static_cast<int32_t>(count);
  for (const int64_t g : group_order_) {
    match.blocks[g].resize(count, kGone);
    if (config_.windows[g] == 0) continue;
    for (int64_t i = first_needed(g, count * block_size()); i < count; ++i)
      match.blocks[g][i] = *find_block(table, token_ids, g, i, match.blocks);
  }
}

PrefixMatch KvCacheManager::skip_prefix(BlockTable& table,
                                        std::span<const int32_t> token_ids) const {
  if (config_.enable_prefix_caching && !table.is_private)
    hash_blocks(table, token_ids, static_cast<int64_t>(token_ids.size()) / block_size());
  return {};
}

int32_t KvCacheManager::num_lacking(const PrefixMatch& match, int64_t num_tokens) const {
  // A matched block that nobody refers to counts as available until it is attached.
  int64_t num_matched = 0;
  int64_t num_revived = 0;
  for (const std::vector<int32_t>& group : match.blocks) {
    for (const int32_t block : group) {
      if (block == kGone) continue;
      ++num_matched;
      if (allocator_.ref_count(block) == 0) ++num_revived;
    }
  }
  const int64_t num_new = num_blocks_for(num_tokens) - num_matched;
  return static_cast<int32_t>(std::max<int64_t>(0, num_new + num_revived - num_available()));
}

void KvCacheManager::attach(BlockTable& table, const PrefixMatch& match,
                            std::span<const int32_t> token_ids) {
  check_internal(table.num_blocks() == 0, "a prefix is attached to a table without blocks");
  table.blocks = match.blocks;
  table.for_each_block([&](int32_t block) { add_ref(block); });
  if (!config_.enable_prefix_caching || table.is_private) return;
  table.num_cached = match.num_blocks;
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
  const int64_t num_held = table.num_blocks();
  const int64_t num_new = std::max<int64_t>(0, num_logical(start + num_new_tokens) - num_held);
  int64_t num_needed = num_new * num_groups();
  for (const std::vector<int32_t>& group : table.blocks) {
    for (int64_t i = start / block_size(); i < num_held; ++i)
      if (allocator_.ref_count(group[i]) > 1) ++num_needed;
  }
  return static_cast<int32_t>(num_needed);
}

void KvCacheManager::allocate(BlockTable& table, int64_t start, int64_t num_new_tokens,
                              std::vector<BlockCopy>& copies) {
  check_internal(can_allocate(table, start, num_new_tokens), "blocks are allocated where they fit");
  table.blocks.resize(num_groups());
  const size_t num_blocks = num_logical(start + num_new_tokens);
  for (std::vector<int32_t>& group : table.blocks) {
    for (size_t i = start / block_size(); i < group.size(); ++i) {
      if (allocator_.ref_count(group[i]) == 1) continue;
      const int32_t copy = take_block();
      copies.push_back({.source = group[i], .destination = copy});
      drop_ref(group[i]);
      group[i] = copy;
    }
    while (group.size() < num_blocks) group.push_back(take_block());
  }
}

void KvCacheManager::commit(BlockTable& table, std::span<const int32_t> token_ids,
                            int64_t num_computed) {
  if (config_.enable_prefix_caching && !table.is_private && table.is_cacheable)
    cache_full_blocks(table, token_ids, num_computed / block_size());
  drop_left(table, num_computed);
}

void KvCacheManager::cache_full_blocks(BlockTable& table, std::span<const int32_t> token_ids,
                                       int64_t num_full) {
  if (num_full == table.num_cached) return;
  hash_blocks(table, token_ids, num_full);
  for (int64_t i = table.num_cached; i < num_full; ++i) {
    for (const int64_t g : group_order_) {
      if (cache_block(table, token_ids, g, i)) continue;
      // Another chain of tokens has this hash. What follows would hang on the wrong parent.
      withdraw_all(table);
      table.is_cacheable = false;
      return;
    }
    withdraw(table, i);
    table.num_cached = static_cast<int32_t>(i + 1);
  }
}

// What the next token does not look at any more. The last of them goes first, as release() has it.
void KvCacheManager::drop_left(BlockTable& table, int64_t num_computed) {
  for (int64_t g = 0; g < std::ssize(table.blocks); ++g) {
    std::vector<int32_t>& group = table.blocks[g];
    for (int64_t i = first_needed(g, num_computed); i-- > 0 && group[i] != kGone;) {
      drop_ref(group[i]);
      group[i] = kGone;
    }
  }
}

bool KvCacheManager::cache_block(BlockTable& table, std::span<const int32_t> token_ids,
                                 int64_t group, int64_t idx) {
  std::vector<int32_t>& blocks = table.blocks[group];
  const TokenHash key = key_of(table.hashes[idx], group);
  const std::span<const int32_t> tokens = block_tokens(token_ids, idx);
  const int32_t parent = parent_of(group, idx, table.blocks);
  if (!prefix_cache_.contains(key)) {
    prefix_cache_.insert(key, blocks[idx], parent, tokens);
    return true;
  }
  const auto equal = prefix_cache_.find(key, parent, tokens);
  if (!equal) return false;
  add_ref(*equal);
  replaced_.push_back(blocks[idx]);
  blocks[idx] = *equal;
  return true;
}

void KvCacheManager::give_back_replaced() {
  for (const int32_t block : replaced_) drop_ref(block);
  replaced_.clear();
}

void KvCacheManager::fork(const BlockTable& parent, BlockTable& child) {
  check_internal(child.num_blocks() == 0, "a fork starts without blocks");
  parent.for_each_block([&](int32_t block) { add_ref(block); });
  child = parent;
  child.num_announced = child.num_cached;
}

void KvCacheManager::release(BlockTable& table) {
  withdraw_all(table);
  // Children before parents: PrefixCache evicts in this order.
  for (size_t g = table.blocks.size(); g-- > 0;) {
    const std::vector<int32_t>& group = table.blocks[group_order_[g]];
    for (size_t i = group.size(); i-- > 0 && group[i] != kGone;) drop_ref(group[i]);
  }
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
  for (const int32_t block : replaced_) ++num_holders[block];
  size_t num_announced = 0;
  for (const BlockTable* table : tables) {
    table->for_each_block([&](int32_t block) { ++num_holders[block]; });
    for (const std::vector<int32_t>& group : table->blocks) {
      for (int32_t i = 0; i < table->num_cached; ++i)
        check_internal(group[i] == kGone || prefix_cache_.holds(group[i]),
                       "the cached blocks of a table are in the prefix cache");
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

void KvCacheManager::check_table(const BlockTable& table, int64_t num_computed,
                                 int64_t num_scheduled) const {
  check_internal(table.num_blocks() == num_logical(num_scheduled),
                 "a sequence holds the blocks of its scheduled tokens and no more");
  for (int64_t g = 0; g < std::ssize(table.blocks); ++g) {
    const std::vector<int32_t>& group = table.blocks[g];
    check_internal(std::ssize(group) == table.num_blocks(), "all groups have as many blocks");
    for (int64_t i = 0; i < std::ssize(group); ++i)
      check_internal((group[i] == kGone) == (i < first_needed(g, num_computed)),
                     "a group has given back what left its window, and nothing else");
  }
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
