// What is asked of whoever moves blocks between the KV pool and a lower tier.
#pragma once

#include <cstdint>
#include <vector>

namespace llmserve {

enum class MemoryTier : uint8_t {
  kPool,   // the KV pool, where steps read and write
  kLower,  // host memory beneath a device's, or a file
};

using TransferId = int64_t;
inline constexpr TransferId kNoTransfer = -1;

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
  std::vector<BlockMove> moves;  // in the order of positions
};

}  // namespace llmserve
