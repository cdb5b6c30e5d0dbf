#include "engine/block_event_feed.h"

#include <utility>

namespace llmserve {

bool BlockEventFeed::push(std::vector<BlockEvent> events) {
  if (events.empty()) return true;
  const std::lock_guard lock(mutex_);
  const int64_t count = std::ssize(events);
  batches_.push_back({.sequence = ++sequence_, .events = std::move(events)});
  num_events_ += count;
  num_unread_ += count;
  while (num_events_ > max_events_) {
    num_events_ -= std::ssize(batches_.front().events);
    batches_.pop_front();
  }
  if (num_unread_ <= 2 * max_events_) return true;
  is_on_ = false;
  batches_.clear();
  num_events_ = 0;
  return false;
}

BlockSnapshot BlockEventFeed::snapshot(std::vector<TokenHash> hashes) {
  const std::lock_guard lock(mutex_);
  if (!is_on_) ++sequence_;  // in place of what was not noted: whoever knows less finds a gap
  is_on_ = true;
  num_unread_ = 0;
  return {.sequence = sequence_, .hashes = std::move(hashes)};
}

std::optional<std::vector<BlockEventBatch>> BlockEventFeed::since(int64_t sequence) {
  const std::lock_guard lock(mutex_);
  const int64_t num_missing = sequence_ - sequence;
  if (!is_on_ || num_missing < 0 || num_missing > std::ssize(batches_)) return std::nullopt;
  num_unread_ = 0;
  return std::vector<BlockEventBatch>(batches_.end() - num_missing, batches_.end());
}

}  // namespace llmserve
