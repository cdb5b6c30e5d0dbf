// Which blocks of the KV pool hold one sequence. Written by KvCacheManager alone.
#pragma once

#include <cstdint>
#include <vector>

#include "api/request.h"
#include "core/token_hash.h"

namespace llmserve {

// Copy-on-write: the whole block, in every layer, before anything of the step is written; in the
// plan's order.
struct BlockCopy {
  int32_t source = 0;
  int32_t destination = 0;
};

struct BlockTable {
  RequestId owner = 0;          // named to those who wait for its blocks
  std::vector<int32_t> blocks;  // position p is in blocks[p / P]; a reference each

  // The hash chain of the sequence's full blocks, as far as it has been needed. It depends on
  // tokens alone, so that it outlives preemption and each block is hashed once.
  TokenHash root;
  std::vector<TokenHash> hashes;

  int32_t num_cached = 0;     // leading blocks that are in the prefix cache
  int32_t num_announced = 0;  // blocks [num_cached, num_announced) are this table's to compute
  int32_t waits_for = -1;     // the block that another table was seen computing
  bool is_cacheable = true;   // false: its blocks must not enter the prefix cache
  bool is_private = false;    // they never may: token ids do not say what they hold
};

}  // namespace llmserve
