#include "engine/rank_threads.h"

#include <utility>

#include "core/pin_thread.h"
#include "core/spin_pause.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

// What lies between two steps, and an equal rank's delay within one: 100 µs or so.
constexpr int kSpinsBeforeSleep = 4000;

// Who spins on the core that another rank needs keeps it from what it waits for.
int spins_before_sleep(int num_ranks) {
  return static_cast<int>(std::thread::hardware_concurrency()) < num_ranks ? 0 : kSpinsBeforeSleep;
}

template <class IsDone>
void spin_until(const IsDone& is_done, int max_spins) {
  for (int spins = 0; spins < max_spins && !is_done(); ++spins) spin_pause();
}

}  // namespace

RankThreads::RankThreads(int num_ranks, std::function<void()> on_failure)
    : num_ranks_(num_ranks),
      max_spins_(spins_before_sleep(num_ranks)),
      on_failure_(std::move(on_failure)) {
  try {
    for (int rank = 1; rank < num_ranks; ++rank)
      threads_.push_back(start_thread([this, rank] { serve(rank); }));
  } catch (...) {
    stop();
    throw;
  }
}

RankThreads::~RankThreads() { stop(); }

void RankThreads::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    has_work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::run_all(const Task& task) {
  {
    const std::lock_guard lock(mutex_);
    task_ = task;
    num_running_ = num_ranks() - 1;
    ++num_tasks_;
    has_work_.notify_all();
  }
  run_rank(task, 0);
  spin_until([this] { return num_running_ == 0; }, max_spins_);
  std::unique_lock lock(mutex_);
  has_ended_.wait(lock, [this] { return num_running_ == 0; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void RankThreads::run_rank(const Task& task, int rank) {
  try {
    task.call(task.work, rank);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) {
        failure_ = std::current_exception();
        failed_rank_ = rank;
      }
    }
    if (on_failure_) on_failure_();
  }
}

void RankThreads::serve(int rank) {
  unpin_thread();  // the engine's thread may have started this one
  std::unique_lock lock(mutex_, std::defer_lock);
  for (int64_t num_done = 0;; ++num_done) {
    const auto is_asked = [&] { return is_stopping_ || num_tasks_ > num_done; };
    spin_until(is_asked, max_spins_);
    lock.lock();
    has_work_.wait(lock, is_asked);
    if (is_stopping_) return;
    const Task task = task_;
    lock.unlock();
    run_rank(task, rank);
    lock.lock();
    if (--num_running_ == 0) has_ended_.notify_one();
    lock.unlock();
  }
}

}  // namespace llmserve
