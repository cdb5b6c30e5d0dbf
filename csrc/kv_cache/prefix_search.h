// The longest prefix of a sequence that every cache group can serve.
//
// A group that keeps all tokens serves as many blocks as it has from the first one on; a group with
// a window serves every length of which it has the blocks that the next token looks at; layers with
// a fixed state serve those of which there is a snapshot.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv_cache/cache_groups.h"
#include "kv_cache/prefix_cache.h"
#include "kv_cache/state_slots.h"

namespace llmserve {

struct PrefixSources {
  const PrefixCache& cache;
  const std::vector<bool>* is_readable = nullptr;  // [blocks] or: all are
  const StateSlots* states = nullptr;              // where a prefix needs one
};

class PrefixSearch {
 public:
  // `hashes` are the chain of the sequence's full blocks, and as many as will be looked for.
  PrefixSearch(const CacheGroups& groups, const PrefixSources& sources,
               std::span<const TokenHash> hashes, std::span<const int32_t> token_ids)
      : groups_(groups),
        sources_(sources),
        hashes_(hashes),
        token_ids_(token_ids),
        blocks_(groups.count()) {}

  // The length in blocks, up to `count`. Once.
  int64_t run(int64_t count);
  // [groups][length] after run(): what serves that prefix, or kGone where nothing needs to.
  GroupBlocks take_blocks() { return std::move(blocks_); }
  // The snapshot of that prefix, or kNoSlot.
  int32_t state_slot() const { return state_slot_; }

 private:
  std::optional<int32_t> find(int64_t group, int64_t idx) const;
  int64_t match_all(int64_t group, int64_t count);
  int64_t match_window(int64_t group, int64_t count) const;
  int64_t match_state(int64_t count);
  void collect(int64_t count);

  const CacheGroups& groups_;
  const PrefixSources sources_;
  const std::span<const TokenHash> hashes_;
  const std::span<const int32_t> token_ids_;
  GroupBlocks blocks_;
  int32_t state_slot_ = kNoSlot;
};

}  // namespace llmserve
