// Signs of life of a thread, for another one that has to know whether it goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace llmserve {

// Written by the thread, read by any.
struct ThreadBeat {
  std::atomic<int64_t> num_ops{0};
  std::atomic<const char*> op{"nothing"};  // the last that it began
  // It waits for others, or for what may take as long as it likes.
  std::atomic<bool> is_paused{false};
  // Of the time that a processor has worked for the thread; the thread's own until it has one.
  std::atomic<clockid_t> cpu_clock{0};
  std::atomic<int> thread_id{0};  // as the system has it; 0: none yet

  // 0 where the system does not say.
  int64_t cpu_us() const;
  // It would run if a processor were free, or waits for a disk. False where the system does not
  // say.
  bool is_runnable() const;
};

// From here to the end of the scope the thread's signs go there, unless they go somewhere already.
class BeatScope {
 public:
  explicit BeatScope(ThreadBeat& beat);
  ~BeatScope();
  BeatScope(const BeatScope&) = delete;
  BeatScope& operator=(const BeatScope&) = delete;

  // Where they go.
  const ThreadBeat& beat() const;

 private:
  const bool is_outer_;
};

// The thread begins an op; a literal. Nothing where nobody looks.
void beat(const char* op);

// The thread is paused in this scope.
class BeatPause {
 public:
  BeatPause();
  ~BeatPause();
  BeatPause(const BeatPause&) = delete;
  BeatPause& operator=(const BeatPause&) = delete;

 private:
  ThreadBeat* const beat_;
  const bool was_paused_;
};

// For how long a thread has stood still, by looks at its signs: so a process that was stopped as a
// whole finds nobody late. Whoever looks owns it.
class StandStill {
 public:
  // The time since the last look. is_working: it has something to do.
  void look(const ThreadBeat& beat, bool is_working, std::chrono::milliseconds since_last);

  // Without an op.
  std::chrono::milliseconds time() const { return time_; }
  // Likewise, and without a processor or the wish for one; 0 where it has had a part of one's time.
  std::chrono::milliseconds idle() const;

 private:
  int64_t num_ops_ = 0;
  int64_t begin_cpu_us_ = 0;
  int64_t cpu_us_ = 0;
  std::chrono::milliseconds time_{0};
  std::chrono::milliseconds idle_{0};
};

}  // namespace llmserve
