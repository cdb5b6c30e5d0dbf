// Notices when an engine's thread stands still in the middle of its work.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "core/thread_beat.h"
#include "engine/rank_patience.h"

namespace llmserve {

// A thread of its own looks. What the engine's thread waits for by rights (other ranks, processes,
// devices, its callers' code) it marks as a pause, and between two steps nobody looks.
class EngineWatch {
 public:
  // `on_left` is called at most once, on the watch's thread, when the engine's thread has stood
  // still for patience.still (patience.alone while it computes) and has not come back within
  // patience.left: with the reason. Without patience nobody looks. Throws ResourceExhausted where
  // the system gives no thread.
  EngineWatch(const RankPatience& patience, std::function<void(const std::string& reason)> on_left);
  ~EngineWatch();
  EngineWatch(const EngineWatch&) = delete;
  EngineWatch& operator=(const EngineWatch&) = delete;

  // Nobody looks any more. Not on the watch's thread.
  void stop();

  ThreadBeat& beat() { return beat_; }
  // The engine's thread works in this scope.
  class Work {
   public:
    explicit Work(EngineWatch& watch) : watch_(watch) {
      llmserve::beat("step");
      watch_.is_working_ = true;
    }
    ~Work() { watch_.is_working_ = false; }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    EngineWatch& watch_;
  };

  // For how long it has stood still, where that is too long; otherwise 0.
  std::chrono::milliseconds stood_still() const {
    return std::chrono::milliseconds(stood_still_ms_);
  }

 private:
  void watch();
  void look();

  const RankPatience patience_;
  const std::function<void(const std::string&)> on_left_;
  ThreadBeat beat_;
  std::atomic<bool> is_working_{false};
  std::atomic<int64_t> stood_still_ms_{0};
  // The watch's thread's own.
  StandStill still_;
  std::chrono::milliseconds left_at_{0};
  bool is_left_ = false;
  std::mutex mutex_;
  std::condition_variable over_;
  bool is_over_ = false;
  std::thread thread_;  // none without patience
};

}  // namespace llmserve
