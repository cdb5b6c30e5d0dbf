#include "kv_cache/cache_groups.h"

#include <numeric>

#include "kv_cache/prefix_cache.h"

namespace llmserve {

CacheGroups::CacheGroups(std::span<const CacheGroupSpec> specs, int32_t block_size)
    : specs_(specs.begin(), specs.end()), block_size_(block_size), order_(specs.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_partition(order_, [this](int64_t group) { return keeps_all(group); });
}

TokenHash CacheGroups::key_of(const TokenHash& hash, int64_t group) {
  TokenHash key = hash;
  key.bytes[30] ^= static_cast<uint8_t>(group >> 8);
  key.bytes[31] ^= static_cast<uint8_t>(group);
  return key;
}

int32_t CacheGroups::parent_of(int64_t group, int64_t idx, const GroupBlocks& blocks) const {
  if (keeps_all(group)) return idx == 0 ? PrefixCache::kNone : blocks[group][idx - 1];
  const int64_t first = order_.front();
  return keeps_all(first) ? blocks[first][idx] : PrefixCache::kNone;
}

}  // namespace llmserve
