// What an engine tells of its prefix cache, so that routers know who has which prefix.
#pragma once

#include <cstdint>
#include <vector>

#include "core/token_hash.h"

namespace llmserve {

struct BlockEvent {
  enum class Kind : uint8_t { kStored, kRemoved, kCleared };
  Kind kind = Kind::kStored;
  TokenHash hash;  // not of kCleared
};

// Events in their order. `sequence` numbers batches without gaps from 1 on: who misses one has to
// start from a snapshot.
struct BlockEventBatch {
  int64_t sequence = 0;
  std::vector<BlockEvent> events;
};

// All blocks that were held after the batch `sequence`.
struct BlockSnapshot {
  int64_t sequence = 0;
  std::vector<TokenHash> hashes;
};

}  // namespace llmserve
