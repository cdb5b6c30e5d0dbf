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

constexpr std::chrono::milliseconds kBetweenLooks{250};
// A thread that gets this part of a processor's time computes, also where many want one, or reads
// weights from a disk. One that sleeps and looks up again and again gets less.
constexpr int64_t kMinBusyShare = 32;

// Who spins on the core that another rank needs keeps it from what it waits for.
int spins_before_sleep(int num_ranks) {
  return static_cast<int>(std::thread::hardware_concurrency()) < num_ranks ? 0 : kSpinsBeforeSleep;
}

template <class IsDone>
void spin_until(const IsDone& is_done, int max_spins) {
  for (int spins = 0; spins < max_spins && !is_done(); ++spins) spin_pause();
}

}  // namespace

RankThreads::RankThreads(int num_ranks, std::function<void()> on_failure,
                         const RankPatience& patience)
    : num_ranks_(num_ranks),
      max_spins_(spins_before_sleep(num_ranks)),
      on_failure_(std::move(on_failure)),
      patience_(patience),
      ranks_(static_cast<size_t>(num_ranks)) {
  try {
    if (num_ranks > 1 && patience.still.count() > 0) watch_ = start_thread([this] { watch(); });
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
  const BeatScope scope(own.beat);
  own.is_working = true;
  try {
    posted.task.call(posted.task.work, rank);
  } catch (...) {
    posted.has_failed = true;
    fail(rank, std::current_exception());
  }
  own.is_working = false;
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
  if (on_failure_) on_failure_();
}

// Time is counted by looks, so that a process that was stopped as a whole finds nobody late.
void RankThreads::watch() {
  unpin_thread();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (over_.wait_for(lock, kBetweenLooks, [this] { return is_stopping_.load(); })) return;
    }
    const auto waits = [](const Rank& rank) { return rank.is_working && rank.beat.is_paused; };
    const auto num_waiting = static_cast<int>(std::ranges::count_if(ranks_, waits));
    for (int rank = 0; rank < num_ranks_; ++rank) look_at(rank, num_waiting);
  }
}

void RankThreads::look_at(int rank, int num_waiting) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  const int64_t num_ops = own.beat.num_ops;
  if (!own.is_working || own.beat.is_paused || num_ops != own.num_ops) {
    own.num_ops = num_ops;
    own.cpu_us = own.beat.cpu_us();
    own.still = {};
    own.is_lost = false;
    return;
  }
  own.still += kBetweenLooks;
  const bool is_busy = own.beat.cpu_us() - own.cpu_us > own.still.count() * 1000 / kMinBusyShare;
  const auto patience = is_busy ? patience_.busy : patience_.still;
  const std::string what =
      concat("rank ", rank, " of ", num_ranks_, " has stood still for ", own.still.count() / 1000,
             " s, after the op ", own.beat.op.load(), " was begun, while others wait for it");
  if (!own.is_lost && num_waiting > 0 && own.still >= patience) {
    own.is_lost = true;
    fail(rank, std::make_exception_ptr(DeviceError(what)));
  }
  if (!own.is_lost || rank == 0 || own.still < patience + patience_.left) return;
  const std::lock_guard lock(mutex_);
  if (has_left_) return;
  reason_ = concat(what, "; its thread cannot be ended: restart the process");
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
