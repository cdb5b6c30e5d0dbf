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
#include "engine/rank_patience.h"

namespace llmserve {

// Rank 0 works on the thread that calls, so that one rank alone starts no thread and takes no lock.
//
// With patience, a thread of its own looks at the ranks: one that stands still while others wait
// for it fails the work as if it had thrown. A thread cannot be ended. The work lasts until it has
// come back, or is left: then RankLeft is thrown, and this object must not be destroyed. Rank 0
// works on its caller's thread, so that the others are freed and nothing is thrown until it comes
// back: `on_left` says that it has not.
class RankThreads {
 public:
  // `on_failure` is called on the thread of the first rank whose work throws, and on those of
  // others that throw after it: it ends the waits of ranks that wait for each other. `on_left` is
  // called on a thread of this object where rank 0 has not come back, with the reason.
  // has_far_ranks: ranks of other processes wait, too, while await_work(true) says so. Throws
  // ResourceExhausted where the system does not give the threads.
  struct Options {
    std::function<void()> on_failure = {};
    RankPatience patience = {};
    bool has_far_ranks = false;
    std::function<void(const std::string& reason)> on_left = {};
  };
  explicit RankThreads(int num_ranks, Options options);
  explicit RankThreads(int num_ranks, std::function<void()> on_failure = {})
      : RankThreads(num_ranks, Options{.on_failure = std::move(on_failure)}) {}
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
    if (is_plain()) return work(0);
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
    if (!is_plain()) post_task(task_of(work));
  }
  template <class Work>
  void finish(const Work& work) {
    if (is_plain()) return work(0);
    finish_task(&work);
  }
  // From now on ranks of other processes wait for those of this one, or do not.
  void await_work(bool is_awaited) { is_awaited_ = is_awaited; }
  // They do in this scope.
  class Awaited {
   public:
    explicit Awaited(RankThreads& ranks) : ranks_(ranks) {
      ranks_.await_work(ranks_.options_.has_far_ranks);
    }
    ~Awaited() { ranks_.await_work(false); }
    Awaited(const Awaited&) = delete;
    Awaited& operator=(const Awaited&) = delete;

   private:
    RankThreads& ranks_;
  };
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
  // One rank, for which nobody waits: nothing is to be done beside its work.
  bool is_plain() const { return num_ranks_ == 1 && !options_.has_far_ranks; }
  bool is_watched() const { return !is_plain() && options_.patience.still.count() > 0; }
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
  void leave(const std::string& reason);
  void stop();

  // What is known of a rank, and by the watching thread alone for how long it has stood still.
  struct alignas(kCacheLineBytes) Rank {
    ThreadBeat own_beat;
    // Where its thread's signs go: its caller's, which may be no more once it has ended its work,
    // or its own. Guarded by beats_mutex_.
    const ThreadBeat* beat = &own_beat;
    std::atomic<bool> is_working{false};
    StandStill still;
    bool is_lost = false;                  // it has failed the work for it
    std::chrono::milliseconds left_at{0};  // of its standing still, when it will be left
    bool is_left = false;                  // it was

    bool waits() const { return is_working && beat->is_paused; }
  };

  const int num_ranks_;
  const int max_spins_;
  const Options options_;
  std::vector<Rank> ranks_;
  std::mutex beats_mutex_;
  std::atomic<bool> is_awaited_{false};
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
