#include "kv_cache/prefix_search.h"

namespace llmserve {

int64_t PrefixSearch::run(int64_t count) {
  for (int64_t g = 0; g < groups_.count(); ++g)
    if (groups_.keeps_all(g)) count = match_all(g, count);
  // A shorter prefix may need blocks that another group has lost: until all agree.
  for (int64_t previous = -1; previous != count;) {
    previous = count;
    for (int64_t g = 0; g < groups_.count(); ++g)
      if (!groups_.keeps_all(g)) count = match_window(g, count);
    if (sources_.states != nullptr) count = match_state(count);
  }
  collect(count);
  return count;
}

std::optional<int32_t> PrefixSearch::find(int64_t group, int64_t idx) const {
  const int32_t block_size = groups_.block_size();
  const auto block = sources_.cache.find(CacheGroups::key_of(hashes_[idx], group),
                                         groups_.parent_of(group, idx, blocks_),
                                         token_ids_.subspan(idx * block_size, block_size));
  if (block && sources_.is_readable != nullptr && !(*sources_.is_readable)[*block])
    return std::nullopt;
  return block;
}

int64_t PrefixSearch::match_all(int64_t group, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto block = find(group, i);
    if (!block) break;
    blocks_[group].push_back(*block);
  }
  return std::ssize(blocks_[group]);
}

// A missing block ends every prefix that would need it, so that each is looked up once.
int64_t PrefixSearch::match_window(int64_t group, int64_t count) const {
  while (count > 0) {
    const int64_t begin = groups_.first_needed(group, count * groups_.block_size());
    int64_t i = count - 1;
    while (i >= begin && find(group, i)) --i;
    if (i < begin) break;
    count = i;
  }
  return count;
}

int64_t PrefixSearch::match_state(int64_t count) {
  state_slot_ = kNoSlot;
  for (; count > 0; --count) {
    const auto slot =
        sources_.states->find(hashes_[count - 1], token_ids_.first(count * groups_.block_size()));
    if (!slot) continue;
    state_slot_ = *slot;
    break;
  }
  return count;
}

void PrefixSearch::collect(int64_t count) {
  for (const int64_t g : groups_.in_order()) {
    blocks_[g].resize(count, kGone);
    if (groups_.keeps_all(g)) continue;
    for (int64_t i = groups_.first_needed(g, count * groups_.block_size()); i < count; ++i)
      blocks_[g][i] = *find(g, i);
  }
}

}  // namespace llmserve
