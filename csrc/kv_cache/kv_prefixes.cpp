// How KvCacheManager finds prefixes, and caches what it will find later.
#include <utility>

#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/prefix_search.h"

namespace llmserve {

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
    if (announced != announced_.end())
      return {.blocks = {}, .state_slot = kNoSlot, .pending = announced->second, .stored = {}};
    table.waits_for = -1;
  }
  const int64_t num_tokens = static_cast<int64_t>(token_ids.size());
  const int64_t num_usable = (num_tokens - 1) / block_size();
  hash_blocks(table, token_ids, num_tokens / block_size());
  PrefixSearch search(groups_,
                      {.cache = pool_.prefix_cache(),
                       .is_readable = nullptr,
                       .states = states_ ? &*states_ : nullptr},
                      table.hashes, token_ids);
  match.num_blocks = static_cast<int32_t>(search.run(num_usable));
  match.blocks = search.take_blocks();
  match.state_slot = search.state_slot();
  if (match.num_blocks == num_usable) return match;
  const auto announced = announced_.find(table.hashes[match.num_blocks]);
  if (announced == announced_.end()) {
    if (tiers_) match.stored = find_stored(table, token_ids, match.num_blocks);
    return match;
  }
  match.pending = announced->second;
  table.waits_for = match.num_blocks;
  return match;
}

// What the lower tier has, if that is more than the pool has.
StoredPrefix KvCacheManager::find_stored(const BlockTable& table,
                                         std::span<const int32_t> token_ids,
                                         int32_t num_blocks) const {
  const int64_t num_usable = (std::ssize(token_ids) - 1) / block_size();
  StoredPrefix prefix = tiers_->find(table, token_ids, num_usable, states_ ? &*states_ : nullptr);
  return prefix.num_blocks > num_blocks ? std::move(prefix) : StoredPrefix();
}

PrefixMatch KvCacheManager::skip_prefix(BlockTable& table,
                                        std::span<const int32_t> token_ids) const {
  if (config_.enable_prefix_caching && !table.is_private)
    hash_blocks(table, token_ids, static_cast<int64_t>(token_ids.size()) / block_size());
  return {};
}

void KvCacheManager::announce(BlockTable& table, std::span<const int32_t> token_ids) {
  table.num_announced = static_cast<int32_t>(token_ids.size() / block_size());
  hash_blocks(table, token_ids, table.num_announced);
  for (int32_t i = table.num_cached; i < table.num_announced; ++i) {
    announced_.try_emplace(table.hashes[i], &table);
  }
}

void KvCacheManager::cache_full_blocks(BlockTable& table, std::span<const int32_t> token_ids,
                                       int64_t num_full) {
  hash_blocks(table, token_ids, num_full);
  for (int64_t i = table.num_cached; i < num_full; ++i) {
    for (const int64_t g : groups_.in_order()) {
      // Of a prefix that was loaded, a windowed group has what the next token looks at alone.
      if (table.blocks[g][i] == kGone || cache_block(table, token_ids, g, i)) continue;
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
                                 int64_t group, int64_t idx) {
  std::vector<int32_t>& blocks = table.blocks[group];
  const TokenHash key = CacheGroups::key_of(table.hashes[idx], group);
  const std::span<const int32_t> tokens = block_tokens(token_ids, idx);
  const int32_t parent = groups_.parent_of(group, idx, table.blocks);
  if (!pool_.prefix_cache().contains(key)) {
    pool_.insert(key, blocks[idx], parent, tokens, group == groups_.in_order().front());
    return true;
  }
  const auto equal = pool_.prefix_cache().find(key, parent, tokens);
  if (!equal) return false;
  // Of a loaded prefix, the pool may have had this group's block and lacked another's beside it. It
  // is not replaced: its reference would outlive those to its parents, once the table is released.
  if (*equal == blocks[idx]) return true;
  pool_.add_ref(*equal);
  replaced_.push_back(blocks[idx]);
  last_readers_.push_back(newest_step_);
  blocks[idx] = *equal;
  return true;
}

// The first group's blocks stand for all groups': it keeps all tokens, if any group does.
void KvCacheManager::tell_blocks(bool is_on) {
  block_events_.clear();
  std::vector<BlockEvent>* const events = is_on ? &block_events_ : nullptr;
  pool_.tell(events, tiers_ ? &tiers_->index().entries() : nullptr);
  if (tiers_) tiers_->tell(events);
  tells_blocks_ = is_on;
}

std::vector<BlockEvent> KvCacheManager::take_block_events() {
  std::vector<BlockEvent> events = std::exchange(block_events_, {});
  for (BlockEvent& event : events) {
    if (event.kind != BlockEvent::Kind::kCleared) event.hash = hash_of(event.hash);
  }
  return events;
}

std::vector<TokenHash> KvCacheManager::held_blocks() const {
  std::vector<TokenHash> hashes;
  pool_.prefix_cache().list_told(hashes, nullptr);
  if (tiers_) tiers_->index().entries().list_told(hashes, &pool_.prefix_cache());
  for (TokenHash& hash : hashes) hash = hash_of(hash);
  return hashes;
}

// Of a key of the first group.
TokenHash KvCacheManager::hash_of(const TokenHash& key) const {
  return CacheGroups::key_of(key, groups_.in_order().front());
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

}  // namespace llmserve
