// What each of the last steps did, how long its phases took, and why each sequence ran or waited.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "scheduler/step_plan.h"

namespace llmserve {

// A step is "prefill" if it ran any prompt token, else "decode". Times are on the engine's clock.
struct StepRecord {
  int64_t step_id = 0;
  int64_t start_us = 0;
  int64_t schedule_us = 0;  // durations of the phases
  int64_t execute_us = 0;
  int64_t commit_us = 0;
  int32_t num_sequences = 0;
  int32_t num_tokens = 0;
  int32_t num_prefill_tokens = 0;
  std::vector<Decision> decisions;

  std::string_view phase() const { return num_prefill_tokens > 0 ? "prefill" : "decode"; }
};

// A ring of records; the oldest goes first. Written by the engine thread, read by any.
class StepTrace {
 public:
  explicit StepTrace(size_t capacity) : records_(capacity) {}

  void record(const StepRecord& step);

  // The records that are still there, oldest first.
  std::vector<StepRecord> snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::vector<StepRecord> records_;  // record i of all time is at i % size
  size_t num_recorded_ = 0;
};

}  // namespace llmserve
