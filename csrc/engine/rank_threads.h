// The ranks' threads: the same work on every rank at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace llmserve {

// Rank 0 works on the thread that calls, so that one rank alone starts no thread and takes no lock.
class RankThreads {
 public:
  // Throws ResourceExhausted where the system does not give the threads.
  explicit RankThreads(int num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int num_ranks() const { return static_cast<int>(failures_.size()); }

  // Calls work(rank) once for each rank, a rank from 1 on always on the same thread, and returns
  // when all have ended. Rethrows what the lowest rank has thrown. One caller at a time.
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

  std::vector<std::exception_ptr> failures_;  // [ranks] of the work at hand
  std::mutex mutex_;                          // guards what follows
  std::condition_variable has_work_;
  std::condition_variable has_ended_;
  Task task_;
  int64_t num_tasks_ = 0;
  int num_running_ = 0;  // threads that have not ended the work at hand
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;  // of the ranks from 1 on
};

}  // namespace llmserve
