// What the engine tells of its blocks, and those that it exchanges with others.
#include <future>

#include "engine/engine.h"
#include "engine/kv_mover.h"

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

KvPeer Engine::open_hand_over(const HandOverOptions& options, std::shared_ptr<KvHost> host) {
  std::shared_ptr<KvMover> mover;
  run_on_thread(std::packaged_task<void()>([this, &options, &host, &mover] {
    mover = executor_->open_hand_over(options, std::move(host));
  }));
  const std::lock_guard lock(metrics_mutex_);
  mover_ = mover;
  return mover->self();
}

std::shared_ptr<KvMover> Engine::mover() const {
  const std::lock_guard lock(metrics_mutex_);
  return mover_;
}

std::shared_ptr<KvHost> Engine::hand_over_host() const {
  const std::shared_ptr<KvMover> found = mover();
  return found ? found->host() : nullptr;
}

int32_t Engine::add_peer(const KvPeer& peer) {
  const std::shared_ptr<KvMover> found = mover();
  if (!found) throw InvalidArgument("a peer: call open_hand_over() first");
  return found->add_peer(peer);
}

bool Engine::has_begun_hand_over(int64_t id) const {
  const std::shared_ptr<KvMover> found = mover();
  return found && found->has_begun(id);
}

std::string Engine::take_hand_over_failure() {
  const std::shared_ptr<KvMover> found = mover();
  return found ? found->take_failure() : std::string();
}

}  // namespace llmserve
