// Notices what nobody who waits for a device can: that its exchanges fail, or never end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/device_queue.h"

namespace llmserve {

// A rank's kernel that exchanges waits for those of the others, however long. So a thread looks at
// all ranks twenty times a second: for errors that the library has found, and whether any rank that
// has exchanges before it gets on. A step's exchanges follow each other within milliseconds; what
// the host does between them, with no exchange under way, may take as long as it likes.
class DeviceWatch {
 public:
  struct Rank {
    std::function<void()> check;              // throws DeviceError once an exchange has failed
    std::function<QueueProgress()> progress;  // with a mark behind each exchange
  };
  struct Failure {
    int64_t group = 0;  // as begin_group() has it
    int rank = 0;
    std::string reason;
  };

  // `give_up` ends all that the ranks exchange, on the watch's thread. Throws ResourceExhausted
  // where the system gives no thread.
  DeviceWatch(std::vector<Rank> ranks, std::function<void(const Failure&)> give_up);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // The ranks have met anew, in the group of this number: nothing has failed. The first exchanges
  // of a group may take long.
  void begin_group(int64_t group);
  // They have exchanged all of a step: from now on they are known to be quick.
  void trust();
  // Exchanges are about to be asked for.
  void wake();
  // Of the last begin_group().
  std::optional<Failure> failure() const;

 private:
  using Clock = std::chrono::steady_clock;

  void watch();
  // Whether any exchange is under way. Gives up where that is needed.
  bool look();

  const std::vector<Rank> ranks_;
  const std::function<void(const Failure&)> give_up_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_awake_ = false;
  bool is_stopping_ = false;
  bool is_trusted_ = false;
  int64_t group_ = 0;
  std::optional<Failure> failure_;
  // The thread's own.
  std::vector<QueueProgress> last_;
  Clock::time_point since_;  // the last of `last_` that differed
  std::thread thread_;
};

}  // namespace llmserve
