#include "kv_cache/tiers.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kv_cache/prefix_search.h"

namespace llmserve {
namespace {

constexpr int32_t kMissing = -2;  // the tier has nothing under this key

}  // namespace

StoredPrefix Tiers::find(const BlockTable& table, std::span<const int32_t> token_ids, int64_t count,
                         const StateSlots* states) const {
  PrefixSearch search(
      groups_, {.cache = index_.entries(), .is_readable = &index_.is_stored(), .states = states},
      table.hashes, token_ids);
  StoredPrefix prefix{.num_blocks = static_cast<int32_t>(search.run(count)),
                      .slots = search.take_blocks(),
                      .blocks = {},
                      .state_slot = search.state_slot()};
  prefix.blocks.resize(groups_.count());
  for (std::vector<int32_t>& group : prefix.blocks) group.resize(prefix.num_blocks, kGone);
  for (const int64_t g : groups_.in_order()) {
    for (int64_t i = 0; i < prefix.num_blocks; ++i) {
      if (prefix.slots[g][i] == kGone || !groups_.has_parent(g, i, prefix.blocks)) continue;
      const auto block = pool_.prefix_cache().find(CacheGroups::key_of(table.hashes[i], g),
                                                   groups_.parent_of(g, i, prefix.blocks),
                                                   tokens_of(token_ids, i));
      if (block) prefix.blocks[g][i] = *block;
    }
  }
  return prefix;
}

void Tiers::store(BlockTable& table, std::span<const int32_t> token_ids) {
  if (table.transfer != kNoTransfer) return;
  if (is_unlinked(table)) let_go(table);
  table.slots.resize(groups_.count());
  Transfer transfer{.from = MemoryTier::kPool, .to = MemoryTier::kLower, .moves = {}};
  for (int64_t i = std::ssize(table.slots[0]); i < table.num_cached; ++i)
    if (!add_to_store(table, token_ids, i, transfer)) break;
  if (transfer.moves.empty()) return;
  num_storing_ += std::ssize(transfer.moves);
  begin(table, std::move(transfer));
}

// What failed to arrive is not in the index any more, nor what hangs on it.
bool Tiers::is_unlinked(const BlockTable& table) const {
  return std::ranges::any_of(table.slots, [this](const std::vector<int32_t>& group) {
    return !group.empty() && group.back() != kGone && !index_.entries().holds(group.back());
  });
}

void Tiers::let_go(BlockTable& table) {
  index_.drop_refs(table.slots, groups_.in_order());
  table.slots.clear();
}

// What the tier has at a place of the table; false where another chain of tokens has its hash.
bool Tiers::find_slots(const BlockTable& table, std::span<const int32_t> token_ids, int64_t idx) {
  found_.assign(groups_.count(), kGone);
  const int64_t first = groups_.in_order().front();
  for (const int64_t g : groups_.in_order()) {
    if (table.blocks[g][idx] == kGone) continue;
    const TokenHash key = CacheGroups::key_of(table.hashes[idx], g);
    if (!index_.entries().contains(key)) {
      found_[g] = kMissing;
      continue;
    }
    int32_t parent = PrefixCache::kNone;
    if (groups_.keeps_all(g)) {
      parent = groups_.parent_of(g, idx, table.slots);
    } else if (groups_.keeps_all(first)) {
      parent = found_[first];
    }
    const auto slot = index_.entries().find(key, parent, tokens_of(token_ids, idx));
    if (!slot) return false;
    found_[g] = *slot;
  }
  return true;
}

bool Tiers::add_to_store(BlockTable& table, std::span<const int32_t> token_ids, int64_t idx,
                         Transfer& transfer) {
  if (!find_slots(table, token_ids, idx)) return false;
  // A slot that is found and that nobody refers to counts as available until it is referred to.
  const int64_t num_places = groups_.count() - std::ranges::count(found_, kGone);
  const int64_t num_new = std::ranges::count(found_, kMissing);
  const int64_t num_moves = num_storing_ + std::ssize(transfer.moves) + num_new;
  if (num_places > index_.slots().num_available()) return false;
  if (num_new > 0 && num_moves > config_.max_stores) return false;
  for (const int32_t slot : found_)
    if (slot >= 0) index_.add_ref(slot);
  for (const int64_t g : groups_.in_order()) {
    if (found_[g] == kMissing) {
      found_[g] = index_.begin_store(CacheGroups::key_of(table.hashes[idx], g),
                                     groups_.parent_of(g, idx, table.slots),
                                     tokens_of(token_ids, idx), g == groups_.in_order().front());
      transfer.moves.push_back({.group = static_cast<int32_t>(g),
                                .source = table.blocks[g][idx],
                                .destination = found_[g]});
    }
    table.slots[g].push_back(found_[g]);
  }
  return true;
}

void Tiers::load(BlockTable& table, const StoredPrefix& prefix) {
  table.blocks = prefix.blocks;
  table.slots = prefix.slots;
  for_each_block(table.blocks, [this](int32_t block) { pool_.add_ref(block); });
  for_each_block(table.slots, [this](int32_t slot) { index_.add_ref(slot); });
  Transfer transfer{.from = MemoryTier::kLower, .to = MemoryTier::kPool, .moves = {}};
  table.num_cached = prefix.num_blocks;
  for (int64_t i = 0; i < prefix.num_blocks; ++i) {
    for (const int64_t g : groups_.in_order()) {
      if (table.slots[g][i] == kGone || table.blocks[g][i] != kGone) continue;
      table.blocks[g][i] = pool_.take();
      transfer.moves.push_back({.group = static_cast<int32_t>(g),
                                .source = table.slots[g][i],
                                .destination = table.blocks[g][i]});
      table.num_cached = std::min(table.num_cached, static_cast<int32_t>(i));
    }
  }
  check_internal(!transfer.moves.empty(), "a load has something to load");
  begin(table, std::move(transfer));
}

void Tiers::begin(BlockTable& table, Transfer transfer) {
  for (const BlockMove& move : transfer.moves) {
    pool_.add_ref(pool_block(transfer, move));
    index_.add_ref(slot_of(move, transfer));
  }
  transfers_.begin(std::move(transfer), &table);
}

void Tiers::fork(const BlockTable& parent) {
  for_each_block(parent.slots, [this](int32_t slot) { index_.add_ref(slot); });
}

void Tiers::drop_left(BlockTable& table, int64_t num_computed) {
  for (int64_t g = 0; g < std::ssize(table.slots); ++g) {
    std::vector<int32_t>& group = table.slots[g];
    const int64_t end = std::min(groups_.first_needed(g, num_computed), std::ssize(group));
    for (int64_t i = end; i-- > 0 && group[i] != kGone;)
      index_.drop_ref(std::exchange(group[i], kGone));
  }
}

void Tiers::clear(std::span<BlockTable* const> tables) {
  index_.clear();
  for (BlockTable* table : tables)
    if (table->transfer == kNoTransfer) let_go(*table);
}

BlockTable* Tiers::finish(const TransferBook::Entry& ended, bool is_done) {
  const Transfer& transfer = ended.transfer;
  const bool is_store = transfer.to == MemoryTier::kLower;
  if (is_store) num_storing_ -= std::ssize(transfer.moves);
  for (size_t i = transfer.moves.size(); i-- > 0;) {  // children before parents
    const int32_t slot = slot_of(transfer.moves[i], transfer);
    if (!is_done) {
      index_.unlink(slot);
    } else if (is_store) {
      index_.finish_store(slot);
    }
    pool_.drop_ref(pool_block(transfer, transfer.moves[i]));
    index_.drop_ref(slot);
  }
  pool_.drop_refs(ended.blocks, groups_.in_order());
  index_.drop_refs(ended.slots, groups_.in_order());
  return is_store ? nullptr : ended.table;
}

void Tiers::check_integrity(std::span<const BlockTable* const> tables) const {
  std::vector<int32_t> num_slot_holders(index_.slots().num_blocks(), 0);
  const auto count_slot = [&](int32_t slot) { ++num_slot_holders[slot]; };
  int64_t num_storing = 0;
  for (const auto& [id, entry] : transfers_.entries()) {
    const Transfer& transfer = entry.transfer;
    for_each_block(entry.slots, count_slot);
    if (transfer.is_hand_over()) continue;
    for (const BlockMove& move : transfer.moves) count_slot(slot_of(move, transfer));
    if (transfer.to == MemoryTier::kLower) num_storing += std::ssize(transfer.moves);
  }
  for (const BlockTable* table : tables) for_each_block(table->slots, count_slot);
  check_internal(num_storing == num_storing_, "the blocks on the way down are counted");
  index_.slots().check_integrity(num_slot_holders);
}

}  // namespace llmserve
