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

KvCacheManager::KvCacheManager(const CacheConfig& config, Hasher hasher, int64_t max_step_tokens)
    : config_(validated(config)),
      hasher_(hasher),
      max_step_tokens_(max_step_tokens),
      groups_(row_groups(config_.groups), config.block_size),
      pool_(config.num_blocks, config.block_size) {
  if (config.enable_prefix_caching && config.lower_tier.num_blocks > 0)
    tiers_.emplace(config.lower_tier, groups_, pool_, transfers_);
  if (config.num_state_slots > 0) states_.emplace(config.num_state_slots);
}

int32_t KvCacheManager::num_lacking(const GroupBlocks& blocks, int64_t num_tokens) const {
  // A matched block that nobody refers to counts as available until it is attached.
  int64_t num_matched = 0;
  int64_t num_revived = 0;
  for_each_block(blocks, [&](int32_t block) {
    ++num_matched;
    if (pool_.ref_count(block) == 0) ++num_revived;
  });
  const int64_t num_new = num_blocks_for(num_tokens) - num_matched;
  return static_cast<int32_t>(std::max<int64_t>(0, num_new + num_revived - pool_.num_available()));
}

void KvCacheManager::attach(BlockTable& table, const PrefixMatch& match,
                            std::span<const int32_t> token_ids) {
  check_internal(table.num_blocks() == 0, "a prefix is attached to a table without blocks");
  table.blocks = match.blocks;
  table.for_each_block([&](int32_t block) { pool_.add_ref(block); });
  if (states_) take_state(table, match.state_slot);
  if (!config_.enable_prefix_caching || table.is_private) return;
  table.num_cached = match.num_blocks;
  table.waits_for = -1;  // whether it did or not
  announce(table, token_ids);
}

void KvCacheManager::load(BlockTable& table, const StoredPrefix& prefix,
                          std::span<const int32_t> token_ids) {
  check_internal(table.num_blocks() == 0, "a prefix is loaded into a table without blocks");
  check_internal(num_lacking(prefix, std::ssize(token_ids)) == 0,
                 "a prefix is loaded where it fits");
  tiers_->load(table, prefix);
  if (states_) take_state(table, prefix.state_slot);
  announce(table, token_ids);
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
  int64_t num_needed = num_new * groups_.count();
  for (const std::vector<int32_t>& group : table.blocks) {
    for (int64_t i = start / block_size(); i < num_held; ++i)
      if (pool_.ref_count(group[i]) > 1) ++num_needed;
  }
  return static_cast<int32_t>(num_needed);
}

void KvCacheManager::allocate(BlockTable& table, int64_t start, int64_t num_new_tokens,
                              std::vector<BlockCopy>& copies) {
  check_internal(can_allocate(table, start, num_new_tokens), "blocks are allocated where they fit");
  table.blocks.resize(groups_.count());
  const size_t num_blocks = num_logical(start + num_new_tokens);
  for (std::vector<int32_t>& group : table.blocks) {
    for (size_t i = start / block_size(); i < group.size(); ++i) {
      if (pool_.ref_count(group[i]) == 1) continue;
      const int32_t copy = pool_.take();
      copies.push_back({.source = group[i], .destination = copy});
      pool_.drop_ref(group[i]);
      group[i] = copy;
    }
    while (group.size() < num_blocks) group.push_back(pool_.take());
  }
}

void KvCacheManager::commit(BlockTable& table, std::span<const int32_t> token_ids,
                            int64_t num_computed) {
  const int64_t num_full = num_computed / block_size();
  if (num_full != table.num_cached && config_.enable_prefix_caching && !table.is_private &&
      table.is_cacheable)
    cache_full_blocks(table, token_ids, num_full);
  if (tiers_) {
    if (table.is_cacheable) tiers_->store(table, token_ids);
    tiers_->drop_left(table, num_computed);
  }
  if (states_) file_states(table, token_ids, num_computed);
  drop_left(table, num_computed);
}

int64_t KvCacheManager::first_kept(const BlockTable& table, int64_t group,
                                   int64_t num_computed) const {
  return groups_.first_needed(group, table.keeps_one_more ? num_computed - 1 : num_computed);
}

// What the next token does not look at any more. The last of them goes first, as release() has it.
void KvCacheManager::drop_left(BlockTable& table, int64_t num_computed) {
  for (int64_t g = 0; g < std::ssize(table.blocks); ++g) {
    std::vector<int32_t>& group = table.blocks[g];
    for (int64_t i = first_kept(table, g, num_computed); i-- > 0 && group[i] != kGone;) {
      pool_.drop_ref(group[i]);
      group[i] = kGone;
    }
  }
}

void KvCacheManager::truncate(BlockTable& table, int64_t num_tokens) {
  const int64_t num_blocks = num_logical(num_tokens);
  check_internal(table.num_cached <= num_blocks, "what was committed is not truncated");
  for (size_t g = table.blocks.size(); g-- > 0;) {
    std::vector<int32_t>& group = table.blocks[groups_.in_order()[g]];
    for (; std::ssize(group) > num_blocks; group.pop_back()) pool_.drop_ref(group.back());
  }
}

void KvCacheManager::give_back_replaced() {
  for (const int32_t block : replaced_) pool_.drop_ref(block);
  replaced_.clear();
  last_readers_.clear();
}

// Steps are planned in order, and so are their readers.
void KvCacheManager::give_back_replaced(int64_t step_id) {
  const auto end = std::ranges::upper_bound(last_readers_, step_id);
  const auto count = end - last_readers_.begin();
  for (int64_t i = 0; i < count; ++i) pool_.drop_ref(replaced_[static_cast<size_t>(i)]);
  replaced_.erase(replaced_.begin(), replaced_.begin() + count);
  last_readers_.erase(last_readers_.begin(), end);
}

void KvCacheManager::fork(const BlockTable& parent, BlockTable& child) {
  check_internal(child.num_blocks() == 0, "a fork starts without blocks");
  parent.for_each_block([&](int32_t block) { pool_.add_ref(block); });
  child = parent;
  child.num_announced = child.num_cached;
  child.transfer = kNoTransfer;
  if (tiers_) tiers_->fork(parent);
  if (states_) fork_state(parent, child);
}

void KvCacheManager::release(BlockTable& table) {
  withdraw_all(table);
  if (states_) release_state(table);
  if (is_moving(table)) {
    transfers_.leave(table);
  } else {
    pool_.drop_refs(table.blocks, groups_.in_order());
    if (tiers_) tiers_->let_go(table);
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
    drop_kept_states(*table);
  }
  pool_.clear();
  if (tiers_) tiers_->clear(tables);
  if (states_) states_->clear();
  if (tells_blocks_) block_events_.push_back({.kind = BlockEvent::Kind::kCleared});
}

BlockTable* KvCacheManager::finish_transfer(TransferId id, bool is_done) {
  const std::optional<TransferBook::Entry> ended = transfers_.end(id);
  if (!ended) return nullptr;
  BlockTable* table =
      ended->transfer.is_hand_over() ? end_hand_over(*ended) : tiers_->finish(*ended, is_done);
  if (table != nullptr && !is_done) release(*table);
  return table;
}

void KvCacheManager::check_integrity(std::span<const BlockTable* const> tables) const {
  std::vector<int32_t> num_holders(num_blocks(), 0);
  for (const int32_t block : replaced_) ++num_holders[block];
  size_t num_announced = 0;
  for (const BlockTable* table : tables) {
    table->for_each_block([&](int32_t block) { ++num_holders[block]; });
    for (const std::vector<int32_t>& group : table->blocks) {
      for (int32_t i = 0; i < table->num_cached; ++i)
        check_internal(group[i] == kGone || pool_.prefix_cache().holds(group[i]),
                       "the cached blocks of a table are in the prefix cache");
    }
    for (int64_t i = table->num_cached; i < table->num_announced; ++i) {
      const auto announced = announced_.find(table->hashes[i]);
      if (announced != announced_.end() && announced->second == table) ++num_announced;
    }
  }
  check_internal(num_announced == announced_.size(), "each announced block has a table");
  transfers_.check_integrity(tables, num_holders);
  if (tiers_) tiers_->check_integrity(tables);
  pool_.check_integrity(num_holders);
  if (states_) check_states(tables);
}

void KvCacheManager::check_table(const BlockTable& table, int64_t num_computed,
                                 int64_t num_scheduled) const {
  check_internal(table.num_blocks() == num_logical(num_scheduled),
                 "a sequence holds the blocks of its scheduled tokens and no more");
  for (int64_t g = 0; g < std::ssize(table.blocks); ++g) {
    const std::vector<int32_t>& group = table.blocks[g];
    check_internal(std::ssize(group) == table.num_blocks(), "all groups have as many blocks");
    for (int64_t i = 0; i < std::ssize(group); ++i) {
      const bool is_needed = i >= groups_.first_needed(g, num_computed);
      const bool is_gone = group[i] == kGone;
      check_internal(
          !(is_gone && is_needed) && (is_gone || i >= first_kept(table, g, num_computed)),
          "a group has given back what left its window, and nothing else");
    }
  }
}

}  // namespace llmserve
