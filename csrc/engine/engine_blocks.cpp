// What the engine tells of its prefix cache.
#include <future>

#include "engine/engine.h"

namespace llmserve {

BlockSnapshot Engine::block_snapshot() {
  BlockSnapshot snapshot;
  run_on_thread(std::packaged_task<void()>([this, &snapshot] {
    if (!block_events_.is_on() && links_.listener == nullptr) scheduler_->tell_blocks(true);
    tell_blocks();
    snapshot = block_events_.snapshot(scheduler_->kv_cache().held_blocks());
  }));
  return snapshot;
}

// Before the events of the step: who sees a request's last one finds its blocks told.
void Engine::tell_blocks() {
  if (!block_events_.is_on() && links_.listener == nullptr) return;
  std::vector<BlockEvent> events = scheduler_->take_block_events();
  if (events.empty()) return;
  if (links_.listener != nullptr) links_.listener->take_blocks(config_.parallel.replica, events);
  const bool has_readers = !block_events_.is_on() || block_events_.push(std::move(events));
  if (!has_readers && links_.listener == nullptr) scheduler_->tell_blocks(false);
}

}  // namespace llmserve
