// What is asked of whoever moves blocks between the KV pool and a lower tier or a peer.
#pragma once

#include <cstdint>
#include <vector>

#include "api/hand_over.h"
#include "core/token_hash.h"

namespace llmserve {

enum class MemoryTier : uint8_t {
  kPool,   // the KV pool, where steps read and write
  kLower,  // host memory beneath a device's, or a file
  kPeer,   // the KV pool of another instance
};

using TransferId = int64_t;
inline constexpr TransferId kNoTransfer = -1;

// A block of a peer is named by its place in the sequence: 0, 1, 2 …
struct BlockMove {
  int32_t group = 0;
  int32_t source = 0;       // a block of `from`
  int32_t destination = 0;  // a block of `to`
};

// Whole blocks, in every layer of their group. Until KvCacheManager::finish_transfer() has been
// told of the end, sources keep their contents and nobody else reads or writes destinations.
struct Transfer {
  TransferId id = kNoTransfer;
  MemoryTier from = MemoryTier::kPool;
  MemoryTier to = MemoryTier::kLower;
  // From or to a peer: of a sequence's first num_tokens tokens. Without moves the receiver has all
  // that it needs. A transfer from a peer that has sent fewer tokens fails.
  HandOver hand_over;
  // To a peer, in parts: full blocks while the prompt is being computed, and the rest at its end.
  bool is_first = true;
  bool is_last = true;
  // Nothing more comes, and what came is let go of: without moves.
  bool is_withdrawal = false;
  int64_t num_tokens = 0;
  // Those tokens, and the hashes of their chain: of the root, then of each full block. Of what is
  // sent the last part alone has them.
  std::vector<int32_t> token_ids;
  std::vector<TokenHash> hashes;
  std::vector<BlockMove> moves;  // in the order of positions

  bool is_hand_over() const { return from == MemoryTier::kPeer || to == MemoryTier::kPeer; }
};

}  // namespace llmserve
