// Signs of life of a thread, for another one that has to know whether it goes on.
#pragma once

#include <atomic>
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

  // 0 where the system does not say.
  int64_t cpu_us() const;
};

// From here to the end of the scope the thread's signs go there.
class BeatScope {
 public:
  explicit BeatScope(ThreadBeat& beat);
  ~BeatScope();
  BeatScope(const BeatScope&) = delete;
  BeatScope& operator=(const BeatScope&) = delete;

 private:
  ThreadBeat* const outer_;
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

}  // namespace llmserve
