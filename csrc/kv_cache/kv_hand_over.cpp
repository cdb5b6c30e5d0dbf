// What KvCacheManager does with the blocks of sequences that go to a peer or come from one.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kv_cache/kv_cache_manager.h"

namespace llmserve {

PrefixMatch KvCacheManager::keep_for(PrefixMatch match, int64_t num_tokens) const {
  for (int64_t g = 0; g < std::ssize(match.blocks); ++g) {
    std::vector<int32_t>& group = match.blocks[g];
    const int64_t end = std::min(groups_.first_needed(g, num_tokens), std::ssize(group));
    std::fill_n(group.begin(), end, kGone);
  }
  return match;
}

// Without tiers and moves.
Transfer KvCacheManager::hand_over_of(BlockTable& table, std::span<const int32_t> token_ids,
                                      const HandOver& hand_over) const {
  const int64_t num_full = std::ssize(token_ids) / block_size();
  hash_blocks(table, token_ids, num_full);
  Transfer transfer{.hand_over = hand_over,
                    .num_tokens = std::ssize(token_ids),
                    .token_ids = {token_ids.begin(), token_ids.end()},
                    .hashes = {table.root},
                    .moves = {}};
  transfer.hashes.insert(transfer.hashes.end(), table.hashes.begin(),
                         table.hashes.begin() + num_full);
  return transfer;
}

void KvCacheManager::receive(BlockTable& table, const PrefixMatch& match,
                             std::span<const int32_t> token_ids, const HandOver& from) {
  const int64_t num_tokens = std::ssize(token_ids) - 1;
  check_internal(table.num_blocks() == 0, "blocks are received by a table that has none");
  check_internal(num_lacking(match, std::ssize(token_ids)) == 0,
                 "blocks are received where they fit");
  table.waits_for = -1;
  table.blocks = match.blocks;
  table.for_each_block([&](int32_t block) { pool_.add_ref(block); });
  table.blocks.resize(groups_.count());
  for (std::vector<int32_t>& group : table.blocks) group.resize(num_logical(num_tokens), kGone);
  Transfer transfer = hand_over_of(table, token_ids.first(static_cast<size_t>(num_tokens)), from);
  transfer.from = MemoryTier::kPeer;
  transfer.to = MemoryTier::kPool;
  int64_t num_here = match.num_blocks;  // leading places that lack no block
  for (int64_t i = 0; i < table.num_blocks(); ++i) {
    for (const int64_t g : groups_.in_order()) {
      int32_t& block = table.blocks[g][i];
      if (block != kGone || i < groups_.first_needed(g, num_tokens)) continue;
      block = pool_.take();
      pool_.add_ref(block);  // the transfer's
      transfer.moves.push_back({.group = static_cast<int32_t>(g),
                                .source = static_cast<int32_t>(i),
                                .destination = block});
      num_here = std::min(num_here, i);
    }
  }
  if (config_.enable_prefix_caching) {
    table.num_cached = static_cast<int32_t>(num_here);
    announce(table, token_ids);
  }
  transfers_.begin(std::move(transfer), &table);
}

// Blocks from num_sent to `end`. The transfer holds those before them, too, so that parents stay as
// long as their children, in whatever order transfers end.
void KvCacheManager::move_to_peer(BlockTable& table, int64_t end, int64_t num_prompt,
                                  Transfer transfer) {
  transfer.from = MemoryTier::kPool;
  transfer.to = MemoryTier::kPeer;
  transfer.is_first = table.num_sent == 0;
  for (int64_t i = table.num_sent; i < end; ++i) {
    for (const int64_t g : groups_.in_order()) {
      const int32_t block = table.blocks[g][i];
      if (block == kGone || i < groups_.first_needed(g, num_prompt - 1)) continue;
      pool_.add_ref(block);
      transfer.moves.push_back({.group = static_cast<int32_t>(g),
                                .source = block,
                                .destination = static_cast<int32_t>(i)});
    }
  }
  BlockTable before;
  before.blocks.resize(table.blocks.size());
  for (int64_t g = 0; g < groups_.count(); ++g) {
    if (!groups_.keeps_all(g)) continue;
    before.blocks[g].assign(table.blocks[g].begin(), table.blocks[g].begin() + table.num_sent);
  }
  before.for_each_block([&](int32_t block) { pool_.add_ref(block); });
  table.num_sent = static_cast<int32_t>(end);
  transfers_.begin(std::move(transfer), &before);
  transfers_.leave(before);
}

void KvCacheManager::send_full(BlockTable& table, int64_t num_computed, int64_t num_prompt,
                               const HandOver& to) {
  const int64_t num_full = num_computed / block_size();
  if (num_full <= table.num_sent) return;
  move_to_peer(table, num_full, num_prompt,
               {.hand_over = to, .is_last = false, .num_tokens = num_computed});
}

void KvCacheManager::send_rest(BlockTable& table, std::span<const int32_t> token_ids,
                               int64_t num_computed, const HandOver& to) {
  move_to_peer(table, num_logical(num_computed), num_computed,
               hand_over_of(table, token_ids.first(static_cast<size_t>(num_computed)), to));
}

void KvCacheManager::withdraw(BlockTable& table, const HandOver& to) {
  if (std::exchange(table.num_sent, 0) > 0) withdraw(to);
}

// Where the first part is among those that no plan has, nobody has heard of it.
void KvCacheManager::withdraw(const HandOver& to) {
  bool is_known = true;
  while (const std::optional<TransferBook::Entry> send = transfers_.cancel_send(to)) {
    is_known = is_known && !send->transfer.is_first;
    end_hand_over(*send);
  }
  if (!is_known) return;
  transfers_.begin({.from = MemoryTier::kPool,
                    .to = MemoryTier::kPeer,
                    .hand_over = to,
                    .is_first = false,
                    .is_withdrawal = true},
                   nullptr);
}

void KvCacheManager::cancel_sends() {
  while (const std::optional<HandOver> unsent = transfers_.unsent()) withdraw(*unsent);
}

BlockTable* KvCacheManager::end_hand_over(const TransferBook::Entry& ended) {
  const std::vector<BlockMove>& moves = ended.transfer.moves;
  for (size_t i = moves.size(); i-- > 0;)  // children before parents
    pool_.drop_ref(pool_block(ended.transfer, moves[i]));
  pool_.drop_refs(ended.blocks, groups_.in_order());
  return ended.table;
}

}  // namespace llmserve
