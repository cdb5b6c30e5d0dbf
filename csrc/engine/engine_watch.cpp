#include "engine/engine_watch.h"

#include <utility>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/start_thread.h"

namespace llmserve {

EngineWatch::EngineWatch(const RankPatience& patience,
                         std::function<void(const std::string& reason)> on_left)
    : patience_(patience), on_left_(std::move(on_left)) {
  if (patience_.still.count() > 0) thread_ = start_thread([this] { watch(); });
}

EngineWatch::~EngineWatch() { stop(); }

void EngineWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    over_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void EngineWatch::watch() {
  unpin_thread();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (over_.wait_for(lock, RankPatience::kBetweenLooks, [this] { return is_over_; })) return;
    }
    look();
  }
}

void EngineWatch::look() {
  still_.look(beat_, is_working_, RankPatience::kBetweenLooks);
  const std::chrono::milliseconds time = still_.time();
  const bool is_late = still_.idle() >= patience_.still || time >= patience_.alone;
  if (!is_late) {
    stood_still_ms_ = 0;
    return;
  }
  if (stood_still_ms_ == 0) left_at_ = time + patience_.left;
  stood_still_ms_ = time.count();
  if (is_left_ || time < left_at_) return;
  is_left_ = true;
  on_left_(concat("the engine's thread has stood still for ", time.count() / 1000,
                  " s, after the op ", beat_.op.load(),
                  " was begun; it cannot be ended: restart the process"));
}

}  // namespace llmserve
