// StepPlan in, the model's flat batch out: one ragged batch for prefill and decode, all of its
// integers in one block of memory.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "api/pooling.h"
#include "kernels/device_steps.h"
#include "layers/model_input.h"
#include "sampling/sampling_slot.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// How large the arrays of a batch are.
struct BatchShape {
  int64_t num_tokens = 0;     // T
  int64_t num_sequences = 0;  // B
  int64_t num_rows = 0;       // S
  int64_t max_blocks = 0;     // M
};

// Tokens of a pooled prompt whose logits are wanted: [begin, begin + count) of the step, which are
// the prompt's from `position` on.
struct PooledRows {
  PooledOutput* output = nullptr;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t position = 0;
};

// Everything of a step that the device reads. Spans of `input`, and those after it, point into the
// block or the builder and stay valid until its next build.
struct StepBatch {
  ModelInput input;
  std::span<const int32_t> awaited_rows;  // [T] rows of the step before, whose tokens these are; -1
  std::span<const SeededDraw> draws;      // [S]
  bool has_awaited = false;
  std::vector<SampleTask> sample_tasks;  // [S], parallel to input.logit_rows
  std::vector<PooledRows> pooled_rows;   // one record a prompt, in the plan's order
  std::vector<std::pair<int32_t, int32_t>>
      copies;  // (source, destination) blocks, before the forward
};

class BatchBuilder {
 public:
  BatchBuilder(int64_t block_size, size_t num_groups)
      : block_size_(block_size), groups_(num_groups), group_inputs_(num_groups) {}

  // What the plan needs, and no more.
  BatchShape shape_of(const StepPlan& plan) const;
  // Bytes of the arrays of a batch; `block` has them, aligned to 8.
  int64_t num_bytes(const BatchShape& shape) const;
  // The sample tasks are the caller's to complete. Awaited tokens are 0 until they are taken. What
  // the shape has beyond the plan is filled up with sequences of one token, which write nothing and
  // see a context of one: whatever the first block begins with.
  StepBatch& build(const StepPlan& plan, const BatchShape& shape, std::span<std::byte> block);

 private:
  // Of one cache group.
  struct Group {
    std::span<int64_t> slots;         // [T]
    std::span<int32_t> block_tables;  // [B, M]
  };

  template <class Visit>
  void lay_out(const BatchShape& shape, const Visit& visit);
  void append_sequence(const ScheduledSequence& sequence, std::span<const int32_t> token_ids);
  void append_given_rows(const ScheduledSequence& sequence);
  void fill_block_tables(const ScheduledSequence& sequence, int64_t max_blocks);
  void append_row(const LogitRow& row);
  void append_pooled(const StepPlan& plan, const PooledSequence& pooled);
  void fill_up(const BatchShape& shape);

  const int64_t block_size_;
  std::vector<Group> groups_;
  std::vector<KvGroupInput> group_inputs_;  // spans of groups_
  StepBatch batch_;
  // Within the block, and how much of them there is so far.
  std::span<SeededDraw> draws_;      // [S]
  std::span<int32_t> token_ids_;     // [T]
  std::span<int32_t> awaited_rows_;  // [T]
  std::span<int32_t> positions_;     // [T]
  std::span<int32_t> query_starts_;  // [B + 1]
  std::span<int32_t> kv_lens_;       // [B]
  std::span<int32_t> logit_rows_;    // [S], indices of tokens
  size_t num_tokens_ = 0;
  size_t num_sequences_ = 0;
  size_t num_rows_ = 0;
  std::vector<GivenRows> given_embeddings_;
};

}  // namespace llmserve
