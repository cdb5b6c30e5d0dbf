// The ranks' threads: the same work on every rank at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace llmserve {

// Rank 0 works on the thread that calls, so that one rank alone starts no thread and takes no lock.
class RankThreads {
 public:
  // `on_failure` is called on the thread of the first rank whose work throws, and on those of
  // others that throw after it: it ends the waits of ranks that wait for each other. Throws
  // ResourceExhausted where the system does not give the threads.
  explicit RankThreads(int num_ranks, std::function<void()> on_failure = {});
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int num_ranks() const { return num_ranks_; }
  // Whose work threw first, the last time that run() has thrown.
  int failed_rank() const { return failed_rank_; }

  // Calls work(rank) once for each rank, a rank from 1 on always on the same thread, and returns
  // when all have ended. Rethrows what was thrown first: other ranks may have failed for it. One
  // caller at a time.
  template <class Work>
  void run(Work&& work) {
    if (num_ranks() == 1) return work(0);
    run_all({[](const void* context, int rank) {
               (*static_cast<const std::remove_reference_t<Work>*>(context))(rank);
             },
             &work});
  }

 private:
  struct Task {
    void (*call)(const void* work, int rank) = nullptr;
    const void* work = nullptr;
  };

  void run_all(const Task& task);
  void run_rank(const Task& task, int rank);
  void serve(int rank);
  void stop();

  const int num_ranks_;
  const int max_spins_;
  const std::function<void()> on_failure_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable has_work_;
  std::condition_variable has_ended_;
  Task task_;
  // These three are looked at without the mutex, too, by who spins before it sleeps.
  std::atomic<int64_t> num_tasks_{0};
  std::atomic<bool> is_stopping_{false};
  std::atomic<int> num_running_{0};  // threads that have not ended the work at hand
  int failed_rank_ = 0;
  std::exception_ptr failure_;        // the first, of the work at hand
  std::vector<std::thread> threads_;  // of the ranks from 1 on
};

}  // namespace llmserve
