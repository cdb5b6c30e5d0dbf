// Makes the flat batch that models take of a StepPlan. Prefill and decode share one ragged batch.
// All integers that the device reads lie in one block of memory, so that one copy brings them over.
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

// The sizes of a batch's arrays.
struct BatchShape {
  int64_t num_tokens = 0;     // T
  int64_t num_sequences = 0;  // B
  int64_t num_rows = 0;       // S
  int64_t max_blocks = 0;     // M
};

// Tokens of a pooled prompt whose logits are wanted: tokens [begin, begin + count) of the step.
// Token `begin` of the step is the prompt's token at `position`.
struct PooledRows {
  PooledOutput* output = nullptr;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t position = 0;
};

// One step, as workers run it. All spans point into the block or the builder, and are valid until
// the builder's next build().
struct StepBatch {
  ModelInput input;
  // [T] The logit row of the step before that draws the token; -1: the token is in input.token_ids.
  std::span<const int32_t> awaited_rows;
  bool has_awaited = false;                         // whether any entry is not -1
  std::span<const SeededDraw> draws;                // [S]
  std::vector<SampleTask> sample_tasks;             // [S], parallel to input.logit_rows
  std::vector<PooledRows> pooled_rows;              // one record a prompt, in the plan's order
  std::vector<std::pair<int32_t, int32_t>> copies;  // of blocks (source, destination), done first
  int64_t second_half = 0;  // the first token of the second half; 0: all run at once
};

class BatchBuilder {
 public:
  // num_groups: cache groups, as many as a plan's sequences have block tables.
  BatchBuilder(int64_t block_size, size_t num_groups)
      : block_size_(block_size), groups_(num_groups), group_inputs_(num_groups) {}

  // The smallest shape that holds the plan.
  BatchShape shape_of(const StepPlan& plan) const;
  // Bytes of the arrays of such a batch.
  int64_t num_bytes(const BatchShape& shape) const;

  // Writes the plan's batch into `block`, which has num_bytes(shape) bytes, aligned to 8.
  //
  // Awaited tokens are 0 until the device fills them in. The caller fills in the mask of each
  // sample task. A shape larger than the plan is filled up with sequences of one token, which store
  // no key or value, and whose context is the first position of block 0. Throws InternalError for a
  // block that is too small.
  StepBatch& build(const StepPlan& plan, const BatchShape& shape, std::span<std::byte> block);

 private:
  // The arrays of one cache group.
  struct Group {
    std::span<int64_t> slots;         // [T]
    std::span<int32_t> block_tables;  // [B, M]
  };

  template <class Visit>
  void lay_out(const BatchShape& shape, const Visit& visit);
  void append_sequence(const ScheduledSequence& sequence, std::span<const int32_t> token_ids);
  void append_given_rows(const ScheduledSequence& sequence);
  void fill_block_tables(const ScheduledSequence& sequence, int64_t max_blocks);
  void append_row(const StepPlan& plan, const LogitRow& row);
  std::span<const int32_t> with_drafts(const StepPlan& plan, const LogitRow& row);
  void append_pooled(const StepPlan& plan, const PooledSequence& pooled);
  void fill_up(const BatchShape& shape);

  const int64_t block_size_;
  std::vector<Group> groups_;
  std::vector<KvGroupInput> group_inputs_;  // spans of groups_
  StepBatch batch_;
  // The arrays within the block.
  std::span<SeededDraw> draws_;       // [S]
  std::span<int32_t> token_ids_;      // [T]
  std::span<int32_t> awaited_rows_;   // [T]
  std::span<int32_t> positions_;      // [T]
  std::span<int32_t> query_starts_;   // [B + 1]
  std::span<int32_t> kv_lens_;        // [B]
  std::span<int32_t> adapters_;       // [B]
  std::span<int32_t> state_slots_;    // [B]
  std::span<int32_t> logit_rows_;     // [S], indices of tokens
  std::span<int32_t> wanted_tokens_;  // [T] 0, 1, 2 …
  // What is written of them so far.
  size_t num_tokens_ = 0;
  size_t num_sequences_ = 0;
  size_t num_rows_ = 0;
  // A sequence's known tokens and its drafted ones together; a plan has them apart.
  std::vector<std::vector<int32_t>> contexts_;
  size_t num_contexts_ = 0;
  int32_t context_sequence_ = -1;  // index in the plan of the last context's sequence
  std::vector<int32_t> wanted_layers_;
  std::vector<GivenRows> given_embeddings_;
};

}  // namespace llmserve
