// How an engine gives memory back while nobody needs it, and takes it again.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "engine/engine.h"

namespace llmserve {

void Engine::allow_seats(int32_t num_seats) {
  if (num_seats < 1) throw InvalidArgument(concat("num_seats must be at least 1, got ", num_seats));
  run_on_thread(
      std::packaged_task<void()>([this, num_seats] { scheduler_->allow_seats(num_seats); }));
}

void Engine::sleep(int32_t level) {
  if (level != 1 && level != 2) {
    throw InvalidArgument(concat("level must be 1 (KV cache) or 2 (weights too), got ", level));
  }
  run_on_thread(std::packaged_task<void()>([this, level] { fall_asleep(level); }));
}

void Engine::wake_up(const std::vector<MemoryPart>& parts) {
  run_on_thread(std::packaged_task<void()>([this, parts] { restore(parts); }));
}

bool Engine::is_sleeping() const {
  const std::lock_guard lock(intake_mutex_);
  return std::ranges::count(is_released_, true) > 0;
}

void Engine::fall_asleep(int32_t level) {
  while (scheduler_->num_in_flight() > 0) finish_step();  // of sequences that have ended
  {
    const std::lock_guard lock(intake_mutex_);
    if (scheduler_->has_unfinished() || !intake_.requests.empty() || !intake_.taken_over.empty()) {
      throw InvalidArgument(
          concat("only an idle engine can sleep, and it has ", metrics().num_requests_running,
                 " running and ", num_queued(),
                 " waiting requests; wait until they have finished, or abort them"));
    }
    is_released_[static_cast<size_t>(MemoryPart::kKvCache)] = true;
    if (level == 2) is_released_[static_cast<size_t>(MemoryPart::kWeights)] = true;
  }
  scheduler_->cancel_sends();  // a plan after wake_up() would send what is in the new pool
  scheduler_->reset_prefix_cache();
  tell_blocks();
  if (speculator_) speculator_->reset();
  executor_->release(MemoryPart::kKvCache);
  if (level == 2) executor_->release(MemoryPart::kWeights);
  keep_memory_use();
  const std::lock_guard lock(metrics_mutex_);  // who called sleep() finds the cache empty
  scheduler_->fill_metrics(metrics_);
}

void Engine::restore(const std::vector<MemoryPart>& parts) {
  for (const MemoryPart part : parts) {
    executor_->restore(part);
    has_background_work_ = true;
    keep_memory_use();
    const std::lock_guard lock(intake_mutex_);
    is_released_[static_cast<size_t>(part)] = false;
  }
}

}  // namespace llmserve
