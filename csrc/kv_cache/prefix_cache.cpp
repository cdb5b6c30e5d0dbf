#include "kv_cache/prefix_cache.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

PrefixCache::PrefixCache(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size),
      entries_(num_blocks),
      tokens_(static_cast<size_t>(num_blocks) * block_size) {}

std::optional<int32_t> PrefixCache::find(const TokenHash& hash, int32_t parent,
                                         std::span<const int32_t> token_ids) const {
  const auto found = block_by_hash_.find(hash);
  if (found == block_by_hash_.end()) return std::nullopt;
  const int32_t block = found->second;
  if (entries_[block].parent != parent) return std::nullopt;
  if (!std::ranges::equal(tokens_of(block), token_ids)) return std::nullopt;
  return block;
}

void PrefixCache::insert(const TokenHash& hash, int32_t block, int32_t parent,
                         std::span<const int32_t> token_ids, bool is_told) {
  check_internal(!entries_[block].is_held, "a block enters the prefix cache once");
  check_internal(parent == kNone || entries_[parent].is_held,
                 "the parent of a cached block is cached");
  const bool is_new = block_by_hash_.emplace(hash, block).second;
  check_internal(is_new, "a hash enters the prefix cache once");
  entries_[block] = {.hash = hash, .parent = parent, .is_held = true, .is_told = is_told};
  if (events_ != nullptr && is_told) note(BlockEvent::Kind::kStored, hash);
  if (parent != kNone) ++entries_[parent].num_children;
  std::ranges::copy(token_ids, tokens_.begin() + static_cast<int64_t>(block) * block_size_);
}

void PrefixCache::add_evictable(int32_t block) {
  Entry& entry = entries_[block];
  check_internal(entry.is_held && !entry.is_evictable, "only a held block becomes evictable, once");
  entry.is_evictable = true;
  entry.older = newest_;
  entry.newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = block;
  newest_ = block;
  ++num_evictable_;
}

void PrefixCache::remove_evictable(int32_t block) {
  Entry& entry = entries_[block];
  check_internal(entry.is_evictable, "only an evictable block is taken off the eviction list");
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
  entry.is_evictable = false;
  --num_evictable_;
}

int32_t PrefixCache::evict() {
  check_internal(oldest_ != kNone, "eviction needs a block that nobody refers to");
  const int32_t block = oldest_;
  check_internal(entries_[block].num_children == 0, "the least recently used block is a leaf");
  remove_evictable(block);
  forget(block);
  return block;
}

void PrefixCache::forget(int32_t block) {
  const int32_t parent = entries_[block].parent;
  if (parent != kNone) --entries_[parent].num_children;
  block_by_hash_.erase(entries_[block].hash);
  if (events_ != nullptr && entries_[block].is_told)
    note(BlockEvent::Kind::kRemoved, entries_[block].hash);
  entries_[block] = {};
}

void PrefixCache::note(BlockEvent::Kind kind, const TokenHash& hash) {
  if (beside_ != nullptr && beside_->contains(hash)) return;
  events_->push_back({.kind = kind, .hash = hash});
}

void PrefixCache::list_told(std::vector<TokenHash>& hashes, const PrefixCache* beside) const {
  for (const Entry& entry : entries_) {
    if (entry.is_told && (beside == nullptr || !beside->contains(entry.hash)))
      hashes.push_back(entry.hash);
  }
}

std::vector<int32_t> PrefixCache::remove(int32_t block) {
  std::vector<int32_t> evictable;
  if (!entries_[block].is_held) return evictable;
  std::unordered_multimap<int32_t, int32_t> children;
  for (size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].is_held) children.emplace(entries_[i].parent, static_cast<int32_t>(i));
  std::vector<int32_t> tree{block};
  for (size_t i = 0; i < tree.size(); ++i) {
    const auto [begin, end] = children.equal_range(tree[i]);
    for (auto child = begin; child != end; ++child) tree.push_back(child->second);
  }
  for (size_t i = tree.size(); i-- > 0;) {  // children before parents
    if (entries_[tree[i]].is_evictable) {
      remove_evictable(tree[i]);
      evictable.push_back(tree[i]);
    }
    forget(tree[i]);
  }
  return evictable;
}

std::vector<int32_t> PrefixCache::clear() {
  std::vector<int32_t> evictable;
  for (int32_t block = oldest_; block != kNone; block = entries_[block].newer) {
    evictable.push_back(block);
  }
  block_by_hash_.clear();
  std::ranges::fill(entries_, Entry{});
  oldest_ = newest_ = kNone;
  num_evictable_ = 0;
  return evictable;
}

void PrefixCache::check_integrity() const {
  std::vector<int32_t> num_children(entries_.size(), 0);
  int32_t num_held = 0;
  for (size_t block = 0; block < entries_.size(); ++block) {
    const Entry& entry = entries_[block];
    if (!entry.is_held) continue;
    ++num_held;
    const auto found = block_by_hash_.find(entry.hash);
    check_internal(found != block_by_hash_.end() && found->second == static_cast<int32_t>(block),
                   "the prefix cache finds each block that it holds");
    if (entry.parent == kNone) continue;
    check_internal(entries_[entry.parent].is_held, "the parent of a cached block is cached");
    check_internal(!entries_[entry.parent].is_evictable || entry.is_evictable,
                   "who refers to a block refers to its parent");
    ++num_children[entry.parent];
  }
  check_internal(num_held == this->num_held(), "the prefix cache holds what its table lists");
  for (size_t block = 0; block < entries_.size(); ++block) {
    check_internal(num_children[block] == entries_[block].num_children,
                   "a cached block knows the number of its children");
  }
  int32_t num_listed = 0;
  std::vector<bool> is_listed(entries_.size(), false);
  for (int32_t block = oldest_; block != kNone; block = entries_[block].newer) {
    const int32_t parent = entries_[block].parent;
    check_internal(entries_[block].is_evictable && ++num_listed <= num_evictable_,
                   "the eviction list holds the evictable blocks");
    check_internal(parent == kNone || !is_listed[parent],
                   "a parent is more recently used than its children");
    is_listed[block] = true;
  }
  check_internal(num_listed == num_evictable_, "the eviction list is whole");
}

}  // namespace llmserve
