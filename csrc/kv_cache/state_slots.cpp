#include "kv_cache/state_slots.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

StateSlots::StateSlots(int32_t num_slots) : snapshots_(num_slots) {
  for (int32_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

int32_t StateSlots::take() {
  check_internal(num_available() > 0, "a state slot is taken only while one is available");
  if (free_.empty()) {
    const int32_t evicted = by_age_.front();
    slot_by_hash_.erase(snapshots_[evicted].hash);
    by_age_.pop_front();
    return evicted;
  }
  const int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

std::optional<int32_t> StateSlots::find(const TokenHash& hash,
                                        std::span<const int32_t> token_ids) const {
  const auto found = slot_by_hash_.find(hash);
  if (found == slot_by_hash_.end()) return std::nullopt;
  if (!std::ranges::equal(snapshots_[found->second].token_ids, token_ids)) return std::nullopt;
  return found->second;
}

void StateSlots::touch(int32_t slot) {
  by_age_.splice(by_age_.end(), by_age_, snapshots_[slot].place);
}

void StateSlots::keep(int32_t slot, const TokenHash& hash, std::span<const int32_t> token_ids) {
  if (!slot_by_hash_.emplace(hash, slot).second) {
    give_back(slot);
    return;
  }
  snapshots_[slot] = {.hash = hash,
                      .token_ids = {token_ids.begin(), token_ids.end()},
                      .place = by_age_.insert(by_age_.end(), slot)};
}

void StateSlots::clear() {
  free_.insert(free_.end(), by_age_.begin(), by_age_.end());
  by_age_.clear();
  slot_by_hash_.clear();
}

void StateSlots::check_integrity(std::span<const int32_t> held) const {
  std::vector<int32_t> num_uses(num_slots(), 0);
  for (const int32_t slot : free_) ++num_uses[slot];
  for (const int32_t slot : held) ++num_uses[slot];
  for (const int32_t slot : by_age_) {
    ++num_uses[slot];
    const auto found = slot_by_hash_.find(snapshots_[slot].hash);
    check_internal(found != slot_by_hash_.end() && found->second == slot,
                   "each snapshot is found by its hash");
  }
  check_internal(std::ranges::all_of(num_uses, [](int32_t count) { return count == 1; }),
                 "a state slot is free, held or a snapshot");
  check_internal(slot_by_hash_.size() == by_age_.size(), "each hash has its snapshot");
}

}  // namespace llmserve
