// The ranks' threads: the same work on every rank, several works in their order.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/prefetch.h"
#include "core/thread_beat.h"

namespace llmserve {

// How long one of several ranks may stand still in a work while another one waits for it.
struct RankPatience {
  // It begins no op, and no processor works for its thread: then the work fails. 0: nobody looks.
  std::chrono::milliseconds still{0};
  // Likewise, while a processor does: no op takes so long.
  std::chrono::milliseconds busy{60'000};
  // For it to come back then; later it is left behind.
  std::chrono::milliseconds left{10'000};
};

// Rank 0 works on the thread that calls, so that one rank alone starts no thread and takes no lock.
//
// With patience, a thread of its own looks at the ranks: one that stands still fails the work as if
// it had thrown. A thread cannot be ended. The work lasts until it has come back, or is left: then
// RankLeft is thrown, and this object must not be destroyed. Of rank 0, which works on its caller's
// thread, only the other ranks are freed.
class RankThreads {
 public:
  // `on_failure` is called on the thread of the first rank whose work throws, and on those of
  // others that throw after it: it ends the waits of ranks that wait for each other. Throws
  // ResourceExhausted where the system does not give the threads.
  explicit RankThreads(int num_ranks, std::function<void()> on_failure = {},
                       const RankPatience& patience = {});
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int num_ranks() const { return num_ranks_; }
  // Whose work threw first, the last time that one has.
  int failed_rank() const { return failed_rank_; }

  // Calls work(rank) once for each rank, a rank from 1 on always on the same thread, and returns
  // when all have ended. Rethrows what was thrown first: other ranks may have failed for it. One
  // caller at a time, and nothing is posted.
  template <class Work>
  void run(const Work& work) {
    if (num_ranks() == 1) return work(0);
    post_task(task_of(work));
    finish_task(&work);
  }

  // The same in two parts, of up to kMaxPosted works at a time, each of which a rank begins when it
  // has ended the one before. post() begins it on the ranks from 1 on. finish(), of the oldest,
  // does the part of rank 0. `work` lives until then, or until drain(), and is the same in both.
  // Once a work has thrown, those posted after it are not begun, and finish() throws the same.
  static constexpr int64_t kMaxPosted = 4;
  template <class Work>
  void post(const Work& work) {
    if (num_ranks() > 1) post_task(task_of(work));
  }
  template <class Work>
  void finish(const Work& work) {
    if (num_ranks() == 1) return work(0);
    finish_task(&work);
  }
  // After finish() has thrown, or where nobody will finish() what is posted: returns when no rank
  // works. The caller ends exchanges with rank 0 first.
  void drain() noexcept;
  bool has_left_rank() const { return has_left_; }

 private:
  struct Task {
    void (*call)(const void* work, int rank) = nullptr;
    const void* work = nullptr;
  };

  // A work between post() and finish().
  struct Posted {
    Task task;
    std::atomic<int> num_running{0};  // threads that have not ended it
    std::atomic<bool> has_failed{false};
  };

  template <class Work>
  static Task task_of(const Work& work) {
    return {[](const void* context, int rank) { (*static_cast<const Work*>(context))(rank); },
            &work};
  }
  Posted& posted(int64_t number) { return posted_[static_cast<size_t>(number % kMaxPosted)]; }
  void post_task(const Task& task);
  void finish_task(const void* work);
  void wait_for_end(Posted& posted);
  void retire();
  void run_rank(Posted& posted, int rank);
  void fail(int rank, std::exception_ptr failure);
  void serve(int rank);
  void watch();
  void look_at(int rank, int num_waiting);
  void stop();

  // What is known of a rank, and by the watching thread alone how it was when it last got on.
  struct alignas(kCacheLineBytes) Rank {
    ThreadBeat beat;
    std::atomic<bool> is_working{false};
    int64_t num_ops = 0;
    int64_t cpu_us = 0;
    std::chrono::milliseconds still{0};  // since, as far as that thread has looked
    bool is_lost = false;                // it has failed the work for it
  };

  const int num_ranks_;
  const int max_spins_;
  const std::function<void()> on_failure_;
  const RankPatience patience_;
  std::vector<Rank> ranks_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable has_work_;
  std::condition_variable has_ended_;
  std::array<Posted, kMaxPosted> posted_;
  // These two, and Posted::num_running, are looked at without the mutex, too, by who spins before
  // it sleeps.
  std::atomic<int64_t> num_posted_{0};
  std::atomic<bool> is_stopping_{false};
  int64_t num_finished_ = 0;             // the caller's
  std::atomic<bool> has_failed_{false};  // a work that is posted has
  int failed_rank_ = 0;
  std::exception_ptr failure_;         // the first, of what is posted
  std::atomic<bool> has_left_{false};  // a rank that has not come back
  std::string reason_;                 // for that
  std::condition_variable over_;
  std::thread watch_;
  std::vector<std::thread> threads_;  // of the ranks from 1 on
};

}  // namespace llmserve
