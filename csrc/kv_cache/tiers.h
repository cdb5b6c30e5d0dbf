// The KV pool's blocks and a lower tier's: what goes down, what comes up, and who holds what
// meanwhile.
//
// Full blocks go down as they enter the prefix cache (write-through), as far as the tier has room
// and no more than max_stores blocks are on the way. A table has at most one transfer at a time;
// what it could not store then, it stores with a later one. A block of one group goes with those of
// all others at its place, or not at all.
//
// A transfer refers to its blocks and slots until finish(). A table that is released before leaves
// it all of its blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "api/engine_config.h"
#include "kv_cache/cache_groups.h"
#include "kv_cache/state_slots.h"
#include "kv_cache/tier_index.h"
#include "kv_cache/transfer_book.h"

namespace llmserve {

// A prefix that a lower tier has the whole of.
struct StoredPrefix {
  int32_t num_blocks = 0;  // more than the pool has, or 0
  GroupBlocks slots;       // [groups][num_blocks] of the tier
  GroupBlocks blocks;      // as many of the pool, where that has them too
  int32_t state_slot = kNoSlot;
};

class Tiers {
 public:
  Tiers(const TierConfig& config, const CacheGroups& groups, BlockPool& pool,
        TransferBook& transfers)
      : config_(config),
        groups_(groups),
        pool_(pool),
        transfers_(transfers),
        index_(config.num_blocks, groups.block_size()) {}

  const TierIndex& index() const { return index_; }
  // PrefixCache::tell of what the tier has and the pool has not.
  void tell(std::vector<BlockEvent>* events) { index_.tell(events, &pool_.prefix_cache()); }

  // Up to `count` blocks of the table's tokens, which are hashed; `states` or nullptr.
  StoredPrefix find(const BlockTable& table, std::span<const int32_t> token_ids, int64_t count,
                    const StateSlots* states) const;
  // Begins to store the table's cached blocks that the tier lacks.
  void store(BlockTable& table, std::span<const int32_t> token_ids);
  // Gives a table without blocks those of the prefix: the pool's, and new ones for what is loaded.
  // Precondition: so many are available.
  void load(BlockTable& table, const StoredPrefix& prefix);

  // A copy of `parent` refers to its slots as well.
  void fork(const BlockTable& parent);
  // What left its group's window after num_computed tokens.
  void drop_left(BlockTable& table, int64_t num_computed);
  // The table, which has no transfer, gives its slots back.
  void let_go(BlockTable& table);
  // Empties the index; `tables` are all that may refer to it.
  void clear(std::span<BlockTable* const> tables);

  // A transfer has ended; is_done: all blocks have arrived. Returns its table, for which it was
  // loaded, or nullptr: it was a store, or the table was released. Of a load that failed, and of
  // what hangs on it, nothing is found any more.
  BlockTable* finish(const TransferBook::Entry& ended, bool is_done);

  // Compares the references to slots with those of `tables` and transfers.
  void check_integrity(std::span<const BlockTable* const> tables) const;

 private:
  std::span<const int32_t> tokens_of(std::span<const int32_t> token_ids, int64_t idx) const {
    return token_ids.subspan(idx * groups_.block_size(), groups_.block_size());
  }
  bool is_unlinked(const BlockTable& table) const;
  bool find_slots(const BlockTable& table, std::span<const int32_t> token_ids, int64_t idx);
  bool add_to_store(BlockTable& table, std::span<const int32_t> token_ids, int64_t idx,
                    Transfer& transfer);
  void begin(BlockTable& table, Transfer transfer);
  int32_t slot_of(const BlockMove& move, const Transfer& transfer) const {
    return transfer.from == MemoryTier::kPool ? move.destination : move.source;
  }

  const TierConfig config_;
  const CacheGroups& groups_;
  BlockPool& pool_;
  TransferBook& transfers_;
  TierIndex index_;
  int64_t num_storing_ = 0;     // blocks on the way down
  std::vector<int32_t> found_;  // [groups] of one place: a slot, kGone or kMissing
};

}  // namespace llmserve
