#include "scheduler/step_plan.h"

namespace llmserve {

std::string_view name(DecisionKind kind) {
  switch (kind) {
    case DecisionKind::kScheduled:
      return "scheduled";
    case DecisionKind::kAdmitted:
      return "admitted";
    case DecisionKind::kChunked:
      return "chunked";
    case DecisionKind::kChunkedForPace:
      return "chunked_for_pace";
    case DecisionKind::kChunkedToSpread:
      return "chunked_to_spread";
    case DecisionKind::kPreempted:
      return "preempted";
    case DecisionKind::kWaitsForBudget:
      return "waits_for_budget";
    case DecisionKind::kWaitsForPace:
      return "waits_for_pace";
    case DecisionKind::kWaitsToSpread:
      return "waits_to_spread";
    case DecisionKind::kWaitsForSeqs:
      return "waits_for_seqs";
    case DecisionKind::kWaitsForBlocks:
      return "waits_for_blocks";
    case DecisionKind::kWaitsForPrefix:
      return "waits_for_prefix";
    case DecisionKind::kWaitsForBatch:
      return "waits_for_batch";
    case DecisionKind::kWaitsForBeams:
      return "waits_for_beams";
    case DecisionKind::kWaitsForStep:
      return "waits_for_step";
  }
  return "unknown";
}

}  // namespace llmserve
