#include "core/thread_pool.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/spin_pause.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

// Long enough to bridge the gaps between the ops of a step (microseconds), short enough that an
// idle engine costs nothing: about 50–100 µs of pauses on current machines, after which a worker
// sleeps.
constexpr int kSpinsBeforePark = 2000;

// A task whose exceptions wait until all threads are out of it: it lives on the caller's stack.
class Guarded {
 public:
  using Call = void (*)(void*, int64_t, int64_t, int);
  Guarded(Call call, void* context) : call_(call), context_(context) {}

  static void run(void* self, int64_t begin, int64_t end, int thread_idx) {
    auto& guarded = *static_cast<Guarded*>(self);
    try {
      guarded.call_(guarded.context_, begin, end, thread_idx);
    } catch (...) {
      if (!guarded.has_failed_.exchange(true)) guarded.error_ = std::current_exception();
    }
  }
  // Once all threads are done.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Call call_;
  void* const context_;
  std::atomic<bool> has_failed_{false};
  std::exception_ptr error_;  // the first
};

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), parts_(static_cast<size_t>(std::max(0, num_threads))) {
  if (num_threads < 1)
    throw InvalidArgument(concat("num_threads must be at least 1, got ", num_threads));
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int i = 1; i < num_threads; ++i)
      threads_.push_back(start_thread([this, i] {
        pin_thread(i);
        worker(i);
      }));
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::pair<int64_t, int64_t> ThreadPool::part_of(int64_t count, int64_t grain,
                                                int64_t thread_idx) const {
  const int64_t num_grains = (count + grain - 1) / grain;
  return {num_grains * thread_idx / num_threads_ * grain,
          std::min(count, num_grains * (thread_idx + 1) / num_threads_ * grain)};
}

std::pair<int64_t, int64_t> ThreadPool::Part::take(int64_t grain, int64_t max_piece) {
  int64_t begin = next.load(std::memory_order_relaxed);
  int64_t piece_end = begin;
  do {
    if (begin >= end) return {end, end};
    const int64_t half = ((end - begin) / 2 + grain - 1) / grain * grain;
    piece_end = std::min(end, begin + std::clamp(half, grain, max_piece));
  } while (!next.compare_exchange_weak(begin, piece_end, std::memory_order_relaxed));
  return {begin, piece_end};
}

void ThreadPool::run_part(int thread_idx) const {
  const auto [begin, end] = part_of(task_.count, task_.grain, thread_idx);
  if (begin < end) task_.call(task_.context, begin, end, thread_idx);
}

void ThreadPool::run(const Task& task) {
  Guarded guarded(task.call, task.context);
  task_ = {&Guarded::run, &guarded, task.count, task.grain};
  num_running_.store(num_threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (num_parked_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }  // a worker between its last look and its sleep has the lock
    wake_.notify_all();
  }
  run_part(0);
  int spins = 0;
  while (num_running_.load(std::memory_order_acquire) > 0) {
    // On a machine with fewer cores than threads the worker needs this core.
    if (++spins > kSpinsBeforePark)
      std::this_thread::yield();
    else
      spin_pause();
  }
  guarded.rethrow();
}

void ThreadPool::worker(int thread_idx) {
  uint64_t seen = 0;
  while (true) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen &&
           !stopping_.load(std::memory_order_relaxed)) {
      if (++spins < kSpinsBeforePark) {
        spin_pause();
        continue;
      }
      std::unique_lock lock(mutex_);
      num_parked_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return generation_.load() != seen || stopping_; });
      num_parked_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (stopping_) return;
    ++seen;
    run_part(thread_idx);
    num_running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace llmserve
