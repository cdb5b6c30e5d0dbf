#include "scheduler/step_plan.h"

namespace llmserve {

void StepPlan::clear() {
  copies.clear();
  state_copies.clear();
  transfers.clear();
  token_ids.clear();
  sequences.clear();
  logit_rows.clear();
  pooled.clear();
  wanted_layers.clear();
  decisions.clear();
  num_branches = num_prefill_tokens = num_recomputed_tokens = 0;
}

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
    case DecisionKind::kDrafted:
      return "drafted";
    case DecisionKind::kDraftsOff:
      return "drafts_off";
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
    case DecisionKind::kWaitsForTransfer:
      return "waits_for_transfer";
    case DecisionKind::kWaitsForGrammar:
      return "waits_for_grammar";
    case DecisionKind::kWaitsForStep:
      return "waits_for_step";
  }
  return "unknown";
}

}  // namespace llmserve
