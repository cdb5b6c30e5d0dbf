// The KV pool as the scheduler sees it: block tables in, blocks out. The only writer of tables.
//
// The states of a block are BlockPool's: free, cached, or referenced, here by block tables. Free +
// cached is what can be allocated.
//
// Layers that look back equally far form a group with blocks of its own; all groups take them from
// one pool, in which every block is as large. A group with a window gives back what has left it.
// A prefix is found if every full group has all of its blocks, and every windowed group those that
// the next token looks at.
//
// A lower tier keeps full blocks after the pool has evicted them: see Tiers. They go there as they
// enter the prefix cache, and come back by load(). A preempted sequence's full blocks are found
// there like anybody's, its last tokens are computed again.
//
// can_x() is const and says whether x() would succeed; x() without it is an InternalError and
// leaves everything as it was.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "api/block_events.h"
#include "api/engine_config.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/block_table.h"
#include "kv_cache/cache_groups.h"
#include "kv_cache/state_slots.h"
#include "kv_cache/tiers.h"
#include "kv_cache/transfer_book.h"

namespace llmserve {

// What the prefix cache has for a sequence.
struct PrefixMatch {
  int32_t num_blocks = 0;  // of tokens; of each group, those that it does not need included
  GroupBlocks blocks;
  int32_t state_slot = kNoSlot;         // the snapshot of the state after them, where there is one
  const BlockTable* pending = nullptr;  // the table that is computing the block after them
  StoredPrefix stored;                  // a longer prefix, for load(), that a lower tier has
};

// In tokens, but evictions in blocks. Hits + misses = queries.
struct PrefixCacheCounters {
  int64_t num_queries = 0;
  int64_t num_hits = 0;
  int64_t num_evictions = 0;
};

class KvCacheManager {
 public:
  using Hasher = TokenHash (*)(const TokenHash& parent, std::span<const int32_t> token_ids);

  static constexpr int64_t kUnbounded = std::numeric_limits<int32_t>::max();

  // A step runs at most max_step_tokens of a sequence, which bounds what a windowed group holds.
  // `hasher` is replaced only by tests that forge collisions: a full group compares the tokens of
  // the whole chain all the same, a windowed one those of the block.
  explicit KvCacheManager(const CacheConfig& config, Hasher hasher = &chain_hash,
                          int64_t max_step_tokens = kUnbounded);

  int32_t block_size() const { return config_.block_size; }
  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t num_free_blocks() const { return pool_.num_free(); }
  int32_t num_cached_blocks() const { return pool_.num_cached(); }
  int32_t num_used_blocks() const { return num_blocks() - pool_.num_available(); }
  int32_t ref_count(int32_t block) const { return pool_.ref_count(block); }
  PrefixCacheCounters counters() const {
    return {counters_.num_queries, counters_.num_hits, pool_.num_evictions()};
  }

  // Blocks that a sequence takes at most on its way to num_tokens tokens.
  int32_t num_blocks_for(int64_t num_tokens) const {
    return static_cast<int32_t>(
        max_blocks_held(groups_.specs(), num_tokens, block_size(), max_step_tokens_));
  }

  // -- admission --------------------------------------------------------------------------------

  // The cached blocks that a table without blocks could start with, given all its tokens. Never
  // covers the last token, which has to run to give logits. `pending` is set when another table is
  // computing the next block: waiting for it saves the work, and `blocks` need not be all then.
  // Extends table.hashes.
  PrefixMatch find_prefix(BlockTable& table, std::span<const int32_t> token_ids) const;
  // The match of a table that is not to read the cache: nothing. Extends table.hashes, so that what
  // it computes can be cached.
  PrefixMatch skip_prefix(BlockTable& table, std::span<const int32_t> token_ids) const;
  // Blocks that would be lacking if the matched prefix were attached to a table that is then grown
  // to num_tokens; 0: it fits.
  int32_t num_lacking(const PrefixMatch& match, int64_t num_tokens) const {
    return num_lacking(match.blocks, num_tokens);
  }
  // The same with the prefix of the lower tier, of which the pool has a part.
  int32_t num_lacking(const StoredPrefix& prefix, int64_t num_tokens) const {
    return num_lacking(prefix.blocks, num_tokens);
  }
  // Precondition: has_state_slot(match.state_slot). Refers to the matched blocks, found for this
  // table since anything last changed, and announces the full blocks of token_ids after them as
  // this table's to compute. The announcement ends as the blocks are committed or the table
  // released.
  void attach(BlockTable& table, const PrefixMatch& match, std::span<const int32_t> token_ids);
  // The same with the longer prefix that the lower tier has, whose missing blocks are new ones that
  // a transfer fills: until that has ended the table is neither read nor grown nor forked.
  // Precondition: num_lacking(prefix, its tokens) is 0, has_state_slot(prefix.state_slot).
  void load(BlockTable& table, const StoredPrefix& prefix, std::span<const int32_t> token_ids);
  void count_query(int64_t num_tokens, int64_t num_hit_tokens);

  // -- growth -----------------------------------------------------------------------------------

  // Blocks that allocate() would take.
  int32_t num_needed(const BlockTable& table, int64_t start, int64_t num_new_tokens) const;
  bool can_allocate(const BlockTable& table, int64_t start, int64_t num_new_tokens) const {
    return num_needed(table, start, num_new_tokens) <= pool_.num_available();
  }
  // Makes positions [start, start + num_new_tokens) writable: new blocks at the end, and a copy of
  // each block in that range that another table refers to as well; the copies are appended.
  void allocate(BlockTable& table, int64_t start, int64_t num_new_tokens,
                std::vector<BlockCopy>& copies);
  // Tokens [0, num_computed) are in the pool: full blocks enter the prefix cache. Where an equal
  // block is cached already, the table switches to that and its own is replaced: their contents are
  // equal bit by bit. Then blocks that left their group's window are given back.
  void commit(BlockTable& table, std::span<const int32_t> token_ids, int64_t num_computed);

  // Gives back what holds nothing of the first num_tokens tokens, which include all that commit()
  // was told of.
  void truncate(BlockTable& table, int64_t num_tokens);

  // Blocks that commit() replaced keep their reference, since steps in flight may read them still,
  // until they are given back here: all, or those that no step after `step_id` reads.
  void give_back_replaced();
  void give_back_replaced(int64_t step_id);
  // Steps are planned up to this one.
  void note_step(int64_t step_id) { newest_step_ = step_id; }
  // Asks for what can_allocate() and allocate() of the table's next token will read.
  void prefetch_newest(const BlockTable& table) const {
    for (const std::vector<int32_t>& group : table.blocks)
      if (!group.empty() && group.back() != kGone) pool_.prefetch(group.back());
  }
  const std::vector<int32_t>& replaced() const { return replaced_; }

  // -- transfers --------------------------------------------------------------------------------

  // Appends the transfers that began since the last call, each to be begun with the next plan.
  void take_transfers(std::vector<Transfer>& transfers) { transfers_.take(transfers); }
  bool has_begun_transfers() const { return transfers_.has_begun(); }
  // A transfer has ended, and nobody touches its blocks any more; is_done: all have arrived. Ids
  // that are not under way are passed over. Returns the table that waited for it, or nullptr: one
  // that was released meanwhile waits no more, and a store has none. With a load that is done the
  // prefix is in the pool, which commit() takes in as if it had been computed. With one that failed
  // the table was released, and the tier has nothing of what should have come.
  BlockTable* finish_transfer(TransferId id, bool is_done);
  // The table's blocks are under way, and releasing it would not make them available.
  static bool is_moving(const BlockTable& table) { return table.transfer != kNoTransfer; }
  int64_t num_transfers() const { return transfers_.num_in_flight(); }
  int32_t num_stored_blocks() const {  // in the lower tier, those on their way included
    return tiers_ ? tiers_->index().entries().num_held() : 0;
  }

  // -- hand-over ---------------------------------------------------------------------------------
  // Between instances, of one sequence: the keys and values of all its tokens but the last, which
  // has to run to give logits.

  // What a match has of the first num_tokens tokens that the next one looks at.
  PrefixMatch keep_for(PrefixMatch match, int64_t num_tokens) const;
  // Gives a table without blocks those of all of token_ids but the last: the match's, and new ones
  // that a transfer fills; until it has ended the table is neither read nor grown. Preconditions:
  // num_lacking(match, tokens) is 0; the match is kept for the tokens but the last.
  void receive(BlockTable& table, const PrefixMatch& match, std::span<const int32_t> token_ids,
               const HandOver& from);
  // Begins to send blocks of the first num_computed of token_ids that have not been sent. The
  // transfer holds them; the table may be released.
  //   before the end   full blocks of what commit() was told of, and of them those that the token
  //                    at num_prompt - 1 looks at, which whoever goes on runs first
  //   at the end       all others, of all that the table has scheduled
  void send_full(BlockTable& table, int64_t num_computed, int64_t num_prompt, const HandOver& to);
  void send_rest(BlockTable& table, std::span<const int32_t> token_ids, int64_t num_computed,
                 const HandOver& to);
  // The peer is not to wait for the rest, and lets go of what was sent.
  void withdraw(BlockTable& table, const HandOver& to);
  // Likewise of what has sends that no plan has: what they would send is not to be trusted.
  void cancel_sends();

  // -- what is held, for who routes by prefixes ---------------------------------------------------
  // Blocks by the hash of all tokens up to their end: those of the pool's prefix cache and of the
  // lower tier, a block once. It costs nothing while it is off, as it is at first.

  // On: notes what is stored and removed from now on. Off: forgets what was noted.
  void tell_blocks(bool is_on);
  // What has happened since the last call, in order.
  std::vector<BlockEvent> take_block_events();
  std::vector<TokenHash> held_blocks() const;

  // -- fixed states ------------------------------------------------------------------------------
  // Where a group keeps them (CacheConfig::num_state_slots): each table that is attached
  // or loaded has a slot until its release, into which a snapshot is copied where its prefix has
  // one, and which a step that begins at position 0 sets. All of it is nothing for other models.

  // Whether attach(), load() (of a match's snapshot) or fork() (kNoSlot) finds a slot.
  bool has_state_slot(int32_t snapshot) const;
  bool has_states() const { return states_.has_value(); }
  bool can_keep_state(const BlockTable& table) const;
  // The state after num_tokens, a multiple of the block size up to which all has been scheduled and
  // after which nothing has, becomes a snapshot: copied with the next plan, found once a step that
  // runs tokens after them is committed.
  void keep_state(BlockTable& table, std::span<const int32_t> token_ids, int64_t num_tokens);
  // Appends the copies asked for since the last call, for the next plan.
  void take_state_copies(std::vector<StateCopy>& copies);
  int32_t num_state_snapshots() const { return states_ ? states_->num_snapshots() : 0; }
  int32_t num_free_state_slots() const { return states_ ? states_->num_free() : 0; }

  // -- sharing and the end ----------------------------------------------------------------------

  // `child`, a table without blocks, shares all blocks and hashes of `parent`.
  // Precondition: has_state_slot(kNoSlot).
  void fork(const BlockTable& parent, BlockTable& child);
  // Gives all blocks back, last first, those of a table that is_moving() with its transfer's end;
  // the table is as if new but for its hashes.
  void release(BlockTable& table);

  // Empties the prefix cache. `tables` are all that hold blocks: what they computed so far will
  // not enter the cache again.
  void reset_prefix_cache(std::span<BlockTable* const> tables);

  // Throws InternalError unless free + cached + referenced = total and each reference count equals
  // the number of its holders among `tables`, which with replaced() and the transfers under way are
  // all that hold blocks; so for the lower tier.
  void check_integrity(std::span<const BlockTable* const> tables) const;
  // Throws InternalError unless the table has the blocks of num_scheduled tokens, of which
  // num_computed are in the pool, and no more.
  void check_table(const BlockTable& table, int64_t num_computed, int64_t num_scheduled) const;

 private:
  int64_t num_logical(int64_t num_tokens) const {
    return (num_tokens + block_size() - 1) / block_size();
  }
  int32_t num_lacking(const GroupBlocks& blocks, int64_t num_tokens) const;
  int64_t first_kept(const BlockTable& table, int64_t group, int64_t num_computed) const;
  StoredPrefix find_stored(const BlockTable& table, std::span<const int32_t> token_ids,
                           int32_t num_blocks) const;
  Transfer hand_over_of(BlockTable& table, std::span<const int32_t> token_ids,
                        const HandOver& hand_over) const;
  BlockTable* end_hand_over(const TransferBook::Entry& ended);
  void move_to_peer(BlockTable& table, int64_t end, int64_t num_prompt, Transfer transfer);
  void withdraw(const HandOver& to);
  void take_state(BlockTable& table, int32_t snapshot);
  void fork_state(const BlockTable& parent, BlockTable& child);
  void file_states(BlockTable& table, std::span<const int32_t> token_ids, int64_t num_computed);
  void drop_kept_states(BlockTable& table);
  void release_state(BlockTable& table);
  void check_states(std::span<const BlockTable* const> tables) const;
  void announce(BlockTable& table, std::span<const int32_t> token_ids);
  void cache_full_blocks(BlockTable& table, std::span<const int32_t> token_ids, int64_t num_full);
  void drop_left(BlockTable& table, int64_t num_computed);
  std::span<const int32_t> block_tokens(std::span<const int32_t> token_ids, int64_t idx) const {
    return token_ids.subspan(idx * block_size(), block_size());
  }
  void hash_blocks(BlockTable& table, std::span<const int32_t> token_ids, int64_t count) const;
  void withdraw(BlockTable& table, int64_t idx);
  void withdraw_all(BlockTable& table);
  bool cache_block(BlockTable& table, std::span<const int32_t> token_ids, int64_t group,
                   int64_t idx);
  TokenHash hash_of(const TokenHash& key) const;

  const CacheConfig config_;
  const Hasher hasher_;
  const int64_t max_step_tokens_;
  const CacheGroups groups_;
  BlockPool pool_;
  TransferBook transfers_;
  std::optional<Tiers> tiers_;
  std::optional<StateSlots> states_;
  std::vector<StateCopy> state_copies_;  // not taken yet
  std::unordered_map<TokenHash, const BlockTable*, TokenHashBucket> announced_;
  std::vector<int32_t> replaced_;
  std::vector<int64_t> last_readers_;  // of each, the newest step that was planned by then
  int64_t newest_step_ = 0;
  bool tells_blocks_ = false;
  std::vector<BlockEvent> block_events_;  // by the keys of the first group
  PrefixCacheCounters counters_;
};

}  // namespace llmserve
