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
  int64_t num_decoding = 0;  // sequences, when it was planned, and how they were shared out
  int32_t num_shares = 1;
  bool has_decodes = false;  // it has some of them
};

}  // namespace llmserve
