// How far a stream has come, as others see it who must not wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

#include "core/device_queue.h"
#include "kernels/cuda/cuda_event.h"

namespace llmserve::cuda {

// Marks in one stream. One thread puts them in; any may look. The device is current for both.
class QueueMarks {
 public:
  // Where many wait to be passed, the newest moves to the end: then it says when all have been.
  void put(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    ++num_marks_;
    if (waiting_.size() < kMaxWaiting) {
      waiting_.push_back({0, take_event()});
    }
    waiting_.back().first = num_marks_;
    waiting_.back().second.record(stream);
  }

  // A failed device passes none.
  QueueProgress look() {
    const std::lock_guard lock(mutex_);
    while (!waiting_.empty() && waiting_.front().second.is_known_to_have_passed()) {
      num_passed_ = waiting_.front().first;
      spare_.push_back(std::move(waiting_.front().second));
      waiting_.pop_front();
    }
    return {num_marks_, num_passed_};
  }

 private:
  // The exchanges of two steps of a model of 80 layers are fewer.
  static constexpr size_t kMaxWaiting = 1024;

  Event take_event() {
    if (spare_.empty()) return Event();
    Event event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }

  std::mutex mutex_;
  int64_t num_marks_ = 0;
  int64_t num_passed_ = 0;
  std::deque<std::pair<int64_t, Event>> waiting_;
  std::deque<Event> spare_;
};

}  // namespace llmserve::cuda
