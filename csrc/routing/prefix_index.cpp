#include "routing/prefix_index.h"

#include <algorithm>

namespace llmserve {

bool PrefixIndex::store(int32_t replica, const TokenHash& hash) {
  const auto [found, is_new] = holders_.try_emplace(hash);
  auto has = found->second[static_cast<size_t>(replica)];
  if (!has) ++num_blocks_[static_cast<size_t>(replica)];
  has = true;
  return is_new;
}

bool PrefixIndex::remove(int32_t replica, const TokenHash& hash) {
  const auto found = holders_.find(hash);
  if (found == holders_.end() || !found->second[static_cast<size_t>(replica)]) return false;
  found->second.reset(static_cast<size_t>(replica));
  --num_blocks_[static_cast<size_t>(replica)];
  if (found->second.any()) return false;
  holders_.erase(found);
  return true;
}

std::vector<TokenHash> PrefixIndex::clear(int32_t replica) {
  std::vector<TokenHash> gone;
  for (auto it = holders_.begin(); it != holders_.end();) {
    it->second.reset(static_cast<size_t>(replica));
    if (it->second.any()) {
      ++it;
      continue;
    }
    gone.push_back(it->first);
    it = holders_.erase(it);
  }
  num_blocks_[static_cast<size_t>(replica)] = 0;
  return gone;
}

std::vector<TokenHash> PrefixIndex::hashes() const {
  std::vector<TokenHash> all;
  all.reserve(holders_.size());
  for (const auto& [hash, replicas] : holders_) all.push_back(hash);
  return all;
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
