#include "engine/rank_threads.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/spin_pause.h"
#include "core/start_thread.h"
#include "engine/executor.h"

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

RankThreads::RankThreads(int num_ranks, Options options)
    : num_ranks_(num_ranks),
      max_spins_(spins_before_sleep(num_ranks)),
      options_(std::move(options)),
      ranks_(static_cast<size_t>(num_ranks)) {
  try {
    if (is_watched()) watch_ = start_thread([this] { watch(); });
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
    over_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  if (watch_.joinable()) watch_.join();
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
  if (has_left_) {
    const std::lock_guard lock(mutex_);
    throw RankLeft(reason_);
  }
  if (!oldest.has_failed) return retire();
  const std::exception_ptr failure = failure_;  // nobody replaces the first
  retire();
  std::rethrow_exception(failure);
}

void RankThreads::wait_for_end(Posted& posted) {
  const auto has_ended = [&] { return posted.num_running == 0 || has_left_; };
  spin_until(has_ended, max_spins_);
  const BeatPause pause;
  std::unique_lock lock(mutex_);
  has_ended_.wait(lock, has_ended);
}

// Of the oldest, which has ended. Once nothing is posted the next one begins anew.
void RankThreads::retire() {
  if (++num_finished_ < num_posted_) return;
  has_failed_ = false;
  failure_ = nullptr;
}

void RankThreads::drain() noexcept {
  while (num_finished_ < num_posted_ && !has_left_) {
    wait_for_end(posted(num_finished_));
    retire();
  }
}

void RankThreads::run_rank(Posted& posted, int rank) {
  if (has_failed_) {
    posted.has_failed = true;
    return;
  }
  Rank& own = ranks_[static_cast<size_t>(rank)];
  const BeatScope scope(own.own_beat);
  const auto watch_beat = [&](const ThreadBeat& beat) {
    if (&beat == own.beat) return;
    const std::lock_guard lock(beats_mutex_);
    own.beat = &beat;
  };
  watch_beat(scope.beat());
  own.is_working = true;
  try {
    posted.task.call(posted.task.work, rank);
  } catch (const RankLeft& error) {  // a thread of the rank's own
    posted.has_failed = true;
    fail(rank, std::current_exception());
    leave(error.what());
  } catch (...) {
    posted.has_failed = true;
    fail(rank, std::current_exception());
  }
  own.is_working = false;
  watch_beat(own.own_beat);
}

// The first one counts.
void RankThreads::fail(int rank, std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_failed_) {
      failure_ = std::move(failure);
      failed_rank_ = rank;
      has_failed_ = true;
    }
  }
  if (options_.on_failure) options_.on_failure();
}

void RankThreads::watch() {
  unpin_thread();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (over_.wait_for(lock, RankPatience::kBetweenLooks, [this] { return is_stopping_.load(); }))
        return;
    }
    int num_waiting = is_awaited_ ? 1 : 0;
    {
      const std::lock_guard lock(beats_mutex_);
      num_waiting += static_cast<int>(std::ranges::count_if(ranks_, &Rank::waits));
    }
    for (int rank = 0; rank < num_ranks_; ++rank) look_at(rank, num_waiting);
  }
}

void RankThreads::look_at(int rank, int num_waiting) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  const RankPatience& patience = options_.patience;
  const char* op = nullptr;
  {
    const std::lock_guard lock(beats_mutex_);
    own.still.look(*own.beat, own.is_working, RankPatience::kBetweenLooks);
    op = own.beat->op;
  }
  const std::chrono::milliseconds time = own.still.time();
  if (time.count() == 0) own.is_lost = false;
  const bool is_late = own.still.idle() >= patience.still || time >= patience.busy;
  if (!is_late) return;
  const std::string what =
      concat("rank ", rank, " of ", num_ranks_, " has stood still for ", time.count() / 1000,
             " s, after the op ", op, " was begun, while others wait for it");
  if (!own.is_lost && num_waiting > 0) {
    own.is_lost = true;
    own.left_at = time + patience.left;
    fail(rank, std::make_exception_ptr(DeviceError(what)));
  }
  if (!own.is_lost || own.is_left || time < own.left_at) return;
  own.is_left = true;
  const std::string reason = concat(what, "; its thread cannot be ended: restart the process");
  if (rank == 0) {
    if (options_.on_left) options_.on_left(reason);
    return;
  }
  leave(reason);
}

void RankThreads::leave(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (has_left_) return;
  reason_ = reason;
  has_left_ = true;
  has_ended_.notify_all();
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
