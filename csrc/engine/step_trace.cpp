#include "engine/step_trace.h"

#include <algorithm>

namespace llmserve {

void StepTrace::record(const StepRecord& step) {
  if (records_.empty()) return;
  const std::lock_guard lock(mutex_);
  records_[num_recorded_++ % records_.size()] = step;  // reuses the old record's memory
}

std::vector<StepRecord> StepTrace::snapshot() const {
  const std::lock_guard lock(mutex_);
  const size_t kept = std::min(num_recorded_, records_.size());
  std::vector<StepRecord> steps;
  steps.reserve(kept);
  for (size_t i = num_recorded_ - kept; i < num_recorded_; ++i)
    steps.push_back(records_[i % records_.size()]);
  return steps;
}

}  // namespace llmserve
