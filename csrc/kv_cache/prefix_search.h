// The longest prefix of a sequence that every cache group can serve.
//
// A group that keeps all tokens serves as many blocks as it has from the first one on; a group with
// a window serves every length of which it has the blocks that the next token looks at.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv_cache/cache_groups.h"
#include "kv_cache/prefix_cache.h"

namespace llmserve {

class PrefixSearch {
 public:
  // `hashes` are the chain of the sequence's full blocks, and as many as will be looked for. Of the
  // cache's blocks only those count that are readable, where that is given.
  PrefixSearch(const CacheGroups& groups, const PrefixCache& cache,
               std::span<const TokenHash> hashes, std::span<const int32_t> token_ids,
               const std::vector<bool>* is_readable = nullptr)
      : groups_(groups),
        cache_(cache),
        hashes_(hashes),
        token_ids_(token_ids),
        is_readable_(is_readable),
        blocks_(groups.count()) {}

  // The length in blocks, up to `count`. Once.
  int64_t run(int64_t count);
  // [groups][length] after run(): what serves that prefix, or kGone where nothing needs to.
  GroupBlocks take_blocks() { return std::move(blocks_); }

 private:
  std::optional<int32_t> find(int64_t group, int64_t idx) const;
  int64_t match_all(int64_t group, int64_t count);
  int64_t match_window(int64_t group, int64_t count) const;
  void collect(int64_t count);

  const CacheGroups& groups_;
  const PrefixCache& cache_;
  const std::span<const TokenHash> hashes_;
  const std::span<const int32_t> token_ids_;
  const std::vector<bool>* const is_readable_;
  GroupBlocks blocks_;
};

}  // namespace llmserve
