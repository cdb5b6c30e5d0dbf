// What the static and the dynamic policy share: a batch is a number of newcomers, admitted together
// and run until the last of them has ended; nobody joins meanwhile.
#pragma once

#include <algorithm>

#include "scheduler/policy.h"

namespace llmserve {

class BatchWindow {
 public:
  explicit BatchWindow(int32_t max_batch_size) : max_batch_size_(max_batch_size) {}

  // Whether the batch of before is over, so that the next one may start.
  bool is_over(const QueueState& queue) const {
    return queue.num_running == 0 && queue.num_returning == 0 && num_absent(queue) == 0;
  }
  bool is_full(const QueueState& queue) const { return queue.num_newcomers >= max_batch_size_; }
  void start(const QueueState& queue) {
    num_absent_ = std::min(queue.num_newcomers, max_batch_size_);
  }
  void on_admitted() { --num_absent_; }
  // Members that have not been admitted yet: memory or a prefix under way held them back. Those who
  // were aborted in the queue are gone with it.
  int32_t num_absent(const QueueState& queue) const {
    return std::min(num_absent_, queue.num_newcomers);
  }

 private:
  const int32_t max_batch_size_;
  int32_t num_absent_ = 0;
};

}  // namespace llmserve
