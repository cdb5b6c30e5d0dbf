// What KvCacheManager does with the fixed states of sequences.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kv_cache/kv_cache_manager.h"

namespace llmserve {

bool KvCacheManager::has_state_slot(int32_t snapshot) const {
  if (!states_) return true;
  const int32_t num_copied = snapshot == kNoSlot ? 0 : 1;  // is not there to be taken
  return states_->num_available() > num_copied;
}

void KvCacheManager::take_state(BlockTable& table, int32_t snapshot) {
  check_internal(has_state_slot(snapshot), "a state slot is taken where there is one");
  if (snapshot != kNoSlot) states_->touch(snapshot);  // so that another is evicted
  table.state_slot = states_->take();
  if (snapshot != kNoSlot)
    state_copies_.push_back({.source = snapshot, .destination = table.state_slot});
}

void KvCacheManager::fork_state(const BlockTable& parent, BlockTable& child) {
  child.kept_states.clear();
  child.state_slot = states_->take();
  state_copies_.push_back({.source = parent.state_slot, .destination = child.state_slot});
}

bool KvCacheManager::can_keep_state(const BlockTable& table) const {
  return states_ && config_.enable_prefix_caching && table.is_cacheable && !table.is_private &&
         states_->num_available() > 0;
}

void KvCacheManager::keep_state(BlockTable& table, std::span<const int32_t> token_ids,
                                int64_t num_tokens) {
  check_internal(can_keep_state(table) && num_tokens > 0 && num_tokens % block_size() == 0,
                 "a state is kept between two blocks, where there is a slot");
  const auto num_blocks = static_cast<int32_t>(num_tokens / block_size());
  hash_blocks(table, token_ids, num_blocks);
  const auto known = states_->find(table.hashes[num_blocks - 1], token_ids.first(num_tokens));
  if (known) return states_->touch(*known);
  const int32_t slot = states_->take();
  state_copies_.push_back({.source = table.state_slot, .destination = slot});
  table.kept_states.push_back({.slot = slot, .num_blocks = num_blocks});
}

// Steps end in order: what runs tokens after those of a state has made its copy before.
void KvCacheManager::file_states(BlockTable& table, std::span<const int32_t> token_ids,
                                 int64_t num_computed) {
  std::erase_if(table.kept_states, [&](const KeptState& kept) {
    const int64_t num_tokens = int64_t{kept.num_blocks} * block_size();
    if (num_computed <= num_tokens) return false;
    states_->keep(kept.slot, table.hashes[kept.num_blocks - 1], token_ids.first(num_tokens));
    return true;
  });
}

void KvCacheManager::drop_kept_states(BlockTable& table) {
  for (const KeptState& kept : table.kept_states) states_->give_back(kept.slot);
  table.kept_states.clear();
}

void KvCacheManager::release_state(BlockTable& table) {
  drop_kept_states(table);
  if (table.state_slot != kNoSlot) states_->give_back(std::exchange(table.state_slot, kNoSlot));
}

void KvCacheManager::take_state_copies(std::vector<StateCopy>& copies) {
  copies.insert(copies.end(), state_copies_.begin(), state_copies_.end());
  state_copies_.clear();
}

void KvCacheManager::check_states(std::span<const BlockTable* const> tables) const {
  std::vector<int32_t> held;
  for (const BlockTable* table : tables) {
    if (table->state_slot != kNoSlot) held.push_back(table->state_slot);
    for (const KeptState& kept : table->kept_states) held.push_back(kept.slot);
    check_internal(table->state_slot != kNoSlot || table->num_blocks() == 0,
                   "a sequence with blocks has a state");
  }
  states_->check_integrity(held);
}

}  // namespace llmserve
