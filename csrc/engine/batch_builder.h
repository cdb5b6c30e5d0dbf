// StepPlan in, the model's flat batch out: one ragged batch for prefill and decode.
#pragma once

#include <utility>
#include <vector>

#include "layers/model_input.h"
#include "sampling/sampling_slot.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// Everything of a step that the device reads. Spans of `input` point into the builder and stay
// valid until its next build.
struct StepBatch {
  ModelInput input;
  std::vector<SampleTask> sample_tasks;  // [S], parallel to input.logit_rows
  std::vector<std::pair<int32_t, int32_t>>
      copies;  // (source, destination) blocks, before the forward
};

class BatchBuilder {
 public:
  BatchBuilder(int64_t block_size, size_t num_groups)
      : block_size_(block_size), groups_(num_groups), group_inputs_(num_groups) {}

  // The sample tasks are the caller's to complete.
  StepBatch& build(const StepPlan& plan);

 private:
  void append_sequence(const ScheduledSequence& sequence);
  void append_given_rows(const ScheduledSequence& sequence);
  void fill_block_tables(const StepPlan& plan);

  // Of one cache group.
  struct Group {
    std::vector<int64_t> slots;         // [T]
    std::vector<int32_t> block_tables;  // [B, M]
  };

  const int64_t block_size_;
  std::vector<Group> groups_;
  std::vector<KvGroupInput> group_inputs_;  // spans of groups_
  StepBatch batch_;
  std::vector<int32_t> token_ids_;  // [T]
  std::vector<GivenRows> given_embeddings_;
  std::vector<int32_t> positions_;     // [T]
  std::vector<int32_t> query_starts_;  // [B + 1]
  std::vector<int32_t> kv_lens_;       // [B]
  std::vector<int32_t> logit_rows_;    // [S], indices of tokens
};

}  // namespace llmserve
