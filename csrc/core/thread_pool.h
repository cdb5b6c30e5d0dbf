// A persistent pool with a fixed partition: the same index range goes to the same thread in every
// call, and a range is cut by its length alone. No allocation or lock per call while the workers
// are awake.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/prefetch.h"

namespace llmserve {

class ThreadPool {
 public:
  // num_threads counts the caller: 1 starts no thread. Throws InvalidArgument below 1,
  // and ResourceExhausted where the system does not give that many.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // Threads that sleep until there is work again.
  int num_parked() const { return num_parked_.load(std::memory_order_relaxed); }

  // Calls fn(begin, end, thread_idx) once a thread for its part of [0, count), cut at multiples of
  // `grain`; returns when all are done, or throws what one threw. One caller at a time; not nested.
  template <class Fn>
  void parallel_for(int64_t count, int64_t grain, Fn&& fn) {
    if (num_threads_ == 1 || count <= grain) {
      if (count > 0) fn(int64_t{0}, count, 0);
      return;
    }
    run(Task{[](void* context, int64_t begin, int64_t end, int thread) {
               (*static_cast<std::remove_reference_t<Fn>*>(context))(begin, end, thread);
             },
             const_cast<void*>(static_cast<const void*>(&fn)), count, grain});
  }

  // Likewise, for parts that take long enough for one thread to fall behind: fn is called once a
  // piece, and who is done with a part takes pieces of the others. Parts are cut anywhere. A part's
  // pieces come in order, each half of what is left of it, but at least `grain` long and at most
  // `max_piece`.
  template <class Fn>
  void parallel_pieces(int64_t count, int64_t grain, int64_t max_piece, Fn&& fn) {
    if (num_threads_ == 1 || count <= grain) return parallel_for(count, grain, fn);
    for (int i = 0; i < num_threads_; ++i) {
      const auto [begin, end] = part_of(count, 1, i);
      parts_[static_cast<size_t>(i)].next.store(begin, std::memory_order_relaxed);
      parts_[static_cast<size_t>(i)].end = end;
    }
    parallel_for(num_threads_, 1, [&](int64_t, int64_t, int thread_idx) {
      for (int i = 0; i < num_threads_; ++i) {
        Part& part = parts_[static_cast<size_t>((thread_idx + i) % num_threads_)];
        while (true) {
          const auto [begin, end] = part.take(grain, max_piece);
          if (begin >= end) break;
          fn(begin, end, thread_idx);
        }
      }
    });
  }

 private:
  // What is left of a thread's part.
  struct alignas(kCacheLineBytes) Part {
    std::atomic<int64_t> next{0};
    int64_t end = 0;

    std::pair<int64_t, int64_t> take(int64_t grain, int64_t max_piece);
  };
  struct Task {
    void (*call)(void*, int64_t, int64_t, int) = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int64_t grain = 1;
  };

  // The t-th thread's part of [0, count).
  std::pair<int64_t, int64_t> part_of(int64_t count, int64_t grain, int64_t thread_idx) const;
  void run(const Task& task);
  void run_part(int thread_idx) const;
  void worker(int thread_idx);
  void stop();

  // What workers spin on and then read lies on one line, and what they write when they are done on
  // another, which only the caller spins on.
  alignas(kCacheLineBytes) const int num_threads_;
  Task task_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> stopping_{false};
  alignas(kCacheLineBytes) std::atomic<int> num_running_{0};
  alignas(kCacheLineBytes) std::atomic<int> num_parked_{0};
  std::vector<Part> parts_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace llmserve
