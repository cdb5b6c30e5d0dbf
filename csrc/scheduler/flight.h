// A step between its plan and its commit.
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/sequence.h"
#include "scheduler/step_plan.h"

namespace llmserve {

struct StepFlight {
  StepPlan plan;
  std::vector<Sequence*> sequences;  // [B] of plan.sequences
  int64_t start_us = 0;
};

}  // namespace llmserve
