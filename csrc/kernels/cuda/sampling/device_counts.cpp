#include "kernels/cuda/sampling/device_counts.h"

#include <algorithm>
#include <utility>

namespace llmserve::cuda {
namespace {

constexpr int64_t kMinEntries = 64;

}  // namespace

const DrawCount* DeviceCounts::bring_up(std::span<const TokenCount> counts, const KeptCounts& kept,
                                        std::vector<CountUpdate>& updates) {
  List& list = lists_[kept.id];
  const auto num_entries = std::ssize(counts);
  if (capacity_of(list) < num_entries) grow(list, num_entries);
  auto* const entries = reinterpret_cast<DrawCount*>(list.data.data());
  const auto update = [&](size_t i) {
    updates.push_back({entries + i, {counts[i].token_id, counts[i].num_generated}});
  };
  // Entries as they are by now: one that was counted in twice is written twice, with one value.
  const auto added = kept.counted.subspan(list.num_known);
  if (added.size() < counts.size())
    for (const uint32_t i : added) update(i);
  else
    for (size_t i = 0; i < counts.size(); ++i) update(i);
  list.num_known = kept.counted.size();
  return entries;
}

// Twice what is asked for, as far as others have left no more. Nothing is released, which would
// wait for the device: what is outgrown serves another sequence.
void DeviceCounts::grow(List& list, int64_t num_entries) {
  const auto num_bytes = num_entries * static_cast<int64_t>(sizeof(DrawCount));
  const auto fits = [&](const Buffer& buffer) { return buffer.num_bytes() >= num_bytes; };
  const auto found = std::ranges::find_if(free_, fits);
  Buffer larger;
  if (found != free_.end()) {
    larger = std::move(*found);
    *found = std::move(free_.back());
    free_.pop_back();
  } else {
    larger = Buffer(
        std::max(kMinEntries, 2 * num_entries) * static_cast<int64_t>(sizeof(DrawCount)), memory_);
  }
  if (list.data.num_bytes() > 0) free_.push_back(std::move(list.data));
  list.data = std::move(larger);
  list.num_known = 0;
}

void DeviceCounts::forget(uint64_t counts_id) {
  const auto place = lists_.find(counts_id);
  if (place == lists_.end()) return;
  if (place->second.data.num_bytes() > 0) free_.push_back(std::move(place->second.data));
  lists_.erase(place);
}

void DeviceCounts::distrust() {
  for (auto& [id, list] : lists_) list.num_known = 0;
}

}  // namespace llmserve::cuda
