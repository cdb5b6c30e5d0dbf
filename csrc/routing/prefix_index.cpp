#include "routing/prefix_index.h"

#include <algorithm>

namespace llmserve {

void PrefixIndex::store(int32_t replica, const TokenHash& hash) {
  auto has = holders_[hash][static_cast<size_t>(replica)];
  if (has) return;
  has = true;
  ++num_blocks_[static_cast<size_t>(replica)];
}

void PrefixIndex::remove(int32_t replica, const TokenHash& hash) {
  const auto found = holders_.find(hash);
  if (found == holders_.end() || !found->second[static_cast<size_t>(replica)]) return;
  found->second.reset(static_cast<size_t>(replica));
  --num_blocks_[static_cast<size_t>(replica)];
  if (found->second.none()) holders_.erase(found);
}

void PrefixIndex::clear(int32_t replica) {
  for (auto it = holders_.begin(); it != holders_.end();) {
    it->second.reset(static_cast<size_t>(replica));
    it = it->second.none() ? holders_.erase(it) : std::next(it);
  }
  num_blocks_[static_cast<size_t>(replica)] = 0;
}

void PrefixIndex::match(std::span<const TokenHash> hashes, std::span<int32_t> num_blocks) const {
  std::fill(num_blocks.begin(), num_blocks.end(), 0);
  Replicas have_all;
  have_all.set();
  int32_t count = 0;
  for (const TokenHash& hash : hashes) {
    const auto found = holders_.find(hash);
    if (found == holders_.end()) return;
    have_all &= found->second;
    if (have_all.none()) return;
    ++count;
    for (size_t r = 0; r < num_blocks.size(); ++r)
      if (have_all[r]) num_blocks[r] = count;
  }
}

void AssumedCache::use(std::span<const TokenHash> hashes, std::vector<TokenHash>& stored,
                       std::vector<TokenHash>& removed) {
  if (std::ssize(hashes) > capacity_) hashes = hashes.first(static_cast<size_t>(capacity_));
  for (auto hash = hashes.rbegin(); hash != hashes.rend(); ++hash) {
    const auto found = places_.find(*hash);
    if (found != places_.end()) {
      order_.splice(order_.begin(), order_, found->second);
    } else {
      order_.push_front(*hash);
      places_.emplace(*hash, order_.begin());
      stored.push_back(*hash);
    }
  }
  while (size() > capacity_) {
    removed.push_back(order_.back());
    places_.erase(order_.back());
    order_.pop_back();
  }
}

}  // namespace llmserve
