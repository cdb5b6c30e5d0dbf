#include "engine/rank_threads.h"

#include <utility>

#include "core/error.h"
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

void RankThreads::post_task(const Task& task) {
  check_internal(num_posted_ - num_finished_ < kMaxPosted, "no more works are posted than go");
  const std::lock_guard lock(mutex_);
  Posted& next = posted(num_posted_);
  next.task = task;
  next.has_failed = false;
  next.num_running = num_ranks() - 1;
  ++num_posted_;
  has_work_.notify_all();
}

void RankThreads::finish_task(const void* work) {
  Posted& oldest = posted(num_finished_);
  check_internal(num_posted_ > num_finished_ && oldest.task.work == work,
                 "works are finished as they were posted");
  run_rank(oldest, 0);
  wait_for_end(oldest);
  if (!oldest.has_failed) return retire();
  const std::exception_ptr failure = failure_;  // nobody replaces the first
  retire();
  std::rethrow_exception(failure);
}

void RankThreads::wait_for_end(Posted& posted) {
  spin_until([&] { return posted.num_running == 0; }, max_spins_);
  std::unique_lock lock(mutex_);
  has_ended_.wait(lock, [&] { return posted.num_running == 0; });
}

// Of the oldest, which has ended. Once nothing is posted the next one begins anew.
void RankThreads::retire() {
  if (++num_finished_ < num_posted_) return;
  has_failed_ = false;
  failure_ = nullptr;
}

void RankThreads::drain() noexcept {
  while (num_finished_ < num_posted_) {
    wait_for_end(posted(num_finished_));
    retire();
  }
}

void RankThreads::run_rank(Posted& posted, int rank) {
  if (has_failed_) {
    posted.has_failed = true;
    return;
  }
  try {
    posted.task.call(posted.task.work, rank);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      posted.has_failed = true;
      if (!has_failed_) {
        failure_ = std::current_exception();
        failed_rank_ = rank;
        has_failed_ = true;
      }
    }
    if (on_failure_) on_failure_();
  }
}

void RankThreads::serve(int rank) {
  unpin_thread();  // the engine's thread may have started this one
  std::unique_lock lock(mutex_, std::defer_lock);
  for (int64_t num_done = 0;; ++num_done) {
    const auto is_asked = [&] { return is_stopping_ || num_posted_ > num_done; };
    spin_until(is_asked, max_spins_);
    lock.lock();
    has_work_.wait(lock, is_asked);
    if (is_stopping_) return;
    lock.unlock();
    Posted& next = posted(num_done);
    run_rank(next, rank);
    lock.lock();
    if (--next.num_running == 0) has_ended_.notify_one();
    lock.unlock();
  }
}

}  // namespace llmserve
