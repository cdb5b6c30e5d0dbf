// Which blocks of the KV pool hold one sequence. Written by KvCacheManager alone.
#pragma once

#include <cstdint>
#include <vector>

#include "api/request.h"
#include "core/token_hash.h"
#include "kv_cache/transfer.h"

namespace llmserve {

// Copy-on-write: the whole block, in every layer, before anything of the step is written; in the
// plan's order.
struct BlockCopy {
  int32_t source = 0;
  int32_t destination = 0;
};

// In a block table: the block has left the group's window and was given back, or is not there.
inline constexpr int32_t kGone = -1;

// [groups][blocks] or empty: position p is in [g][p / P]. All groups of one length.
using GroupBlocks = std::vector<std::vector<int32_t>>;

// Calls visit(block) for every block that is there.
template <class Visit>
void for_each_block(const GroupBlocks& blocks, const Visit& visit) {
  for (const std::vector<int32_t>& group : blocks)
    for (const int32_t block : group)
      if (block != kGone) visit(block);
}

inline constexpr int32_t kNoSlot = -1;

// A state on its way to a snapshot: see StateSlots.
struct KeptState {
  int32_t slot = kNoSlot;
  int32_t num_blocks = 0;  // of the tokens before it
};

struct BlockTable {
  // A reference each, but for those that are kGone, which come first.
  GroupBlocks blocks;

  int32_t num_cached = 0;     // leading blocks, of each group, that entered the prefix cache
  int32_t num_announced = 0;  // blocks [num_cached, num_announced) are this table's to compute
  int32_t waits_for = -1;     // the block that another table was seen computing
  bool is_cacheable = true;   // false: its blocks must not enter the prefix cache
  // For a peer, who runs the last computed token again: what that one looks at stays, too.
  bool keeps_one_more = false;
  int32_t num_sent = 0;     // leading blocks, of each group, that went to it or need not go
  bool is_private = false;  // they never may: token ids do not say what they hold

  // The hash chain of the sequence's full blocks, as far as it has been needed. It depends on
  // tokens alone, so that it outlives preemption and each block is hashed once.
  std::vector<TokenHash> hashes;
  TokenHash root;
  RequestId owner = 0;  // named to those who wait for its blocks

  GroupBlocks slots;                  // of a lower tier that has its leading blocks, as `blocks`
  TransferId transfer = kNoTransfer;  // under way, of its blocks: one with the tier or from a peer

  int32_t state_slot = kNoSlot;  // of StateSlots, where there are any
  std::vector<KeptState> kept_states;

  int32_t num_blocks() const {  // of each group, those that are gone included
    return blocks.empty() ? 0 : static_cast<int32_t>(blocks[0].size());
  }
  // Calls visit(block) for every reference.
  template <class Visit>
  void for_each_block(const Visit& visit) const {
    llmserve::for_each_block(blocks, visit);
  }
  int32_t num_references() const {
    int32_t count = 0;
    for_each_block([&](int32_t) { ++count; });
    return count;
  }
};

}  // namespace llmserve
