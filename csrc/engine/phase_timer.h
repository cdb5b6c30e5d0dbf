// Times of the parts of a step.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace llmserve {

// Adds the time since its construction to a duration.
class PhaseTimer {
 public:
  PhaseTimer(const Clock& clock, int64_t& duration_us)
      : clock_(clock), duration_us_(duration_us), start_us_(clock.now_us()) {}
  ~PhaseTimer() { duration_us_ += clock_.now_us() - start_us_; }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  const Clock& clock_;
  int64_t& duration_us_;
  const int64_t start_us_;
};

}  // namespace llmserve
