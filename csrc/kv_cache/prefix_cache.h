// Finds blocks by what they hold: chained hash -> block, with least-recently-used eviction of the
// blocks that nobody refers to.
//
// Blocks form trees: a block's parent holds the tokens just before it, or says more of them than
// the block can. A holder of a block holds all its ancestors and lets go of the block first; so a
// parent is always more recently used than its children, and the least recently used block is a
// leaf.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "api/block_events.h"
#include "core/token_hash.h"

namespace llmserve {

class PrefixCache {
 public:
  static constexpr int32_t kNone = -1;

  PrefixCache(int32_t num_blocks, int32_t block_size);

  // The block with this hash, this predecessor (kNone for a first block) and these very tokens [P]:
  // a hash alone is not believed, and by induction the whole chain's tokens are compared.
  std::optional<int32_t> find(const TokenHash& hash, int32_t parent,
                              std::span<const int32_t> token_ids) const;
  // Whether any block has this hash.
  bool contains(const TokenHash& hash) const { return block_by_hash_.contains(hash); }
  bool holds(int32_t block) const { return entries_[block].is_held; }

  // Takes in a full block that has a reference. The hash must be new, the parent held. is_told: see
  // tell().
  void insert(const TokenHash& hash, int32_t block, int32_t parent,
              std::span<const int32_t> token_ids, bool is_told = true);

  // From now on appends to `events` which blocks that are told come in and go, and not what the
  // cache `beside` this one (or nullptr) holds as well; nullptr: no more. A clear() is not told.
  void tell(std::vector<BlockEvent>* events, const PrefixCache* beside) {
    events_ = events;
    beside_ = beside;
  }
  // Appends the hashes of the held blocks that are told and that `beside` (or nullptr) lacks.
  void list_told(std::vector<TokenHash>& hashes, const PrefixCache* beside) const;

  // A held block lost its last reference: evictable, as the most recently used.
  void add_evictable(int32_t block);
  // It is referred to again.
  void remove_evictable(int32_t block);
  int32_t num_evictable() const { return num_evictable_; }
  int32_t num_held() const { return static_cast<int32_t>(block_by_hash_.size()); }

  // Forgets the least recently used evictable block and returns it. Precondition: there is one.
  int32_t evict();
  // Forgets a block, if it is held, and all that hangs on it; returns those of them that had no
  // reference. Looks at every block.
  std::vector<int32_t> remove(int32_t block);
  // Forgets everything; returns the blocks that had no reference.
  std::vector<int32_t> clear();

  // Throws InternalError unless tree, table and eviction list agree.
  void check_integrity() const;

 private:
  void forget(int32_t block);
  void note(BlockEvent::Kind kind, const TokenHash& hash);

  struct Entry {
    TokenHash hash;
    int32_t parent = kNone;
    int32_t num_children = 0;
    int32_t older = kNone;  // neighbours in the eviction list
    int32_t newer = kNone;
    bool is_held = false;
    bool is_evictable = false;
    bool is_told = false;
  };

  std::span<const int32_t> tokens_of(int32_t block) const {
    return {tokens_.data() + static_cast<int64_t>(block) * block_size_,
            static_cast<size_t>(block_size_)};
  }

  const int32_t block_size_;
  std::unordered_map<TokenHash, int32_t, TokenHashBucket> block_by_hash_;
  std::vector<Entry> entries_;   // [N]
  std::vector<int32_t> tokens_;  // [N, P]
  int32_t oldest_ = kNone;
  int32_t newest_ = kNone;
  int32_t num_evictable_ = 0;
  std::vector<BlockEvent>* events_ = nullptr;  // nobody listens
  const PrefixCache* beside_ = nullptr;
};

}  // namespace llmserve
