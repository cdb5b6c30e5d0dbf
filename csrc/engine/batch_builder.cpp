#include "engine/batch_builder.h"

#include <algorithm>

namespace llmserve {

// The tokens of the prompt get its rows, and any id; those generated after it have their own.
void BatchBuilder::append_given_rows(const ScheduledSequence& sequence) {
  if (sequence.prompt_embeds == nullptr) return;
  const int64_t num_rows = sequence.prompt_embeds->num_rows - sequence.start_position;
  const int64_t count = std::min(num_rows, std::ssize(sequence.token_ids));
  if (count <= 0) return;
  const int64_t begin = std::ssize(token_ids_) - std::ssize(sequence.token_ids);
  std::fill_n(token_ids_.begin() + begin, count, 0);
  given_embeddings_.push_back({.begin = begin,
                               .count = count,
                               .rows = sequence.prompt_embeds->row(sequence.start_position)});
}

void BatchBuilder::append_sequence(const ScheduledSequence& sequence) {
  for (size_t i = 0; i < sequence.token_ids.size(); ++i) {
    const int64_t position = sequence.start_position + static_cast<int64_t>(i);
    token_ids_.push_back(sequence.token_ids[i]);
    positions_.push_back(static_cast<int32_t>(position));
    for (size_t g = 0; g < groups_.size(); ++g)
      groups_[g].slots.push_back(sequence.block_tables[g][position / block_size_] * block_size_ +
                                 position % block_size_);
  }
  append_given_rows(sequence);
  query_starts_.push_back(static_cast<int32_t>(token_ids_.size()));
  kv_lens_.push_back(
      static_cast<int32_t>(sequence.start_position + std::ssize(sequence.token_ids)));
}

void BatchBuilder::fill_block_tables(const StepPlan& plan) {
  int64_t max_blocks = 0;
  for (const int32_t kv_len : kv_lens_)
    max_blocks = std::max(max_blocks, (kv_len + block_size_ - 1) / block_size_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    std::vector<int32_t>& tables = groups_[g].block_tables;
    tables.assign(plan.sequences.size() * max_blocks, 0);
    for (size_t b = 0; b < plan.sequences.size(); ++b) {
      const std::span<const int32_t> blocks = plan.sequences[b].block_tables[g];
      const int64_t used = (kv_lens_[b] + block_size_ - 1) / block_size_;
      // What has left the window is not looked at; any block will do.
      std::ranges::transform(blocks.first(used), tables.begin() + b * max_blocks,
                             [](int32_t block) { return std::max(block, 0); });
    }
    group_inputs_[g] = {.slots = groups_[g].slots, .block_tables = tables};
  }
  batch_.input.max_blocks = max_blocks;
}

StepBatch& BatchBuilder::build(const StepPlan& plan) {
  token_ids_.clear();
  given_embeddings_.clear();
  positions_.clear();
  for (Group& group : groups_) group.slots.clear();
  query_starts_.assign(1, 0);
  kv_lens_.clear();
  logit_rows_.clear();
  batch_.sample_tasks.clear();
  batch_.copies.clear();
  for (const ScheduledSequence& sequence : plan.sequences) append_sequence(sequence);
  fill_block_tables(plan);
  for (const LogitRow& row : plan.logit_rows) {
    logit_rows_.push_back(query_starts_[row.sequence_idx] + row.token_offset);
    batch_.sample_tasks.push_back({.request_id = row.request_id,
                                   .sample_index = row.sample_index,
                                   .params = row.params,
                                   .seed = row.seed,
                                   .position = row.position,
                                   .given_token_id = row.given_token_id,
                                   .token_ids = row.token_ids,
                                   .num_prompt_tokens = row.num_prompt_tokens,
                                   .banned_token_ids = row.banned_token_ids});
  }
  for (const BlockCopy& copy : plan.copies)
    batch_.copies.emplace_back(copy.source, copy.destination);
  batch_.input.token_ids = token_ids_;
  batch_.input.given_embeddings = given_embeddings_;
  batch_.input.positions = positions_;
  batch_.input.query_starts = query_starts_;
  batch_.input.kv_lens = kv_lens_;
  batch_.input.kv_groups = group_inputs_;
  batch_.input.logit_rows = logit_rows_;
  return batch_;
}

}  // namespace llmserve
