#include "engine/batch_builder.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/prefetch.h"

namespace llmserve {
namespace {

// Block tables lie with their sequences, which a step's weights may have pushed out of the caches.
// Asked for so many sequences ahead, they made a batch of 256 take 28 us instead of 34.
constexpr size_t kPrefetched = 8;

void prefetch_tables(const ScheduledSequence& sequence) {
  for (const std::vector<int32_t>& blocks : sequence.block_tables)
    prefetch(blocks.data(), blocks.size() * sizeof(int32_t));
}

}  // namespace

BatchShape BatchBuilder::shape_of(const StepPlan& plan) const {
  int64_t max_blocks = 0;
  for (const ScheduledSequence& sequence : plan.sequences)
    max_blocks = std::max(max_blocks, (sequence.end_position() + block_size_ - 1) / block_size_);
  return {.num_tokens = plan.num_tokens(),
          .num_sequences = std::ssize(plan.sequences),
          .num_rows = std::ssize(plan.logit_rows),
          .max_blocks = max_blocks};
}

// Visits every array and how long it is: those of 8 bytes an element first, so that all are
// aligned.
template <class Visit>
void BatchBuilder::lay_out(const BatchShape& shape, const Visit& visit) {
  for (Group& group : groups_) visit(group.slots, shape.num_tokens);
  visit(draws_, shape.num_rows);
  visit(token_ids_, shape.num_tokens);
  visit(awaited_rows_, shape.num_tokens);
  visit(positions_, shape.num_tokens);
  visit(query_starts_, shape.num_sequences + 1);
  visit(kv_lens_, shape.num_sequences);
  visit(adapters_, shape.num_sequences);
  visit(state_slots_, shape.num_sequences);
  visit(logit_rows_, shape.num_rows);
  visit(wanted_tokens_, shape.num_tokens);
  for (Group& group : groups_) visit(group.block_tables, shape.num_sequences * shape.max_blocks);
}

int64_t BatchBuilder::num_bytes(const BatchShape& shape) const {
  const auto count = static_cast<int64_t>(groups_.size());
  const int64_t longs = count * shape.num_tokens;
  const int64_t ints = 4 * shape.num_tokens + 4 * shape.num_sequences + 1 + shape.num_rows +
                       count * shape.num_sequences * shape.max_blocks;
  return 8 * longs + 4 * ints + shape.num_rows * static_cast<int64_t>(sizeof(SeededDraw));
}

// The tokens of the prompt get its rows, and any id; those generated after it have their own.
void BatchBuilder::append_given_rows(const ScheduledSequence& sequence) {
  if (sequence.prompt_embeds == nullptr) return;
  const int64_t num_rows = sequence.prompt_embeds->num_rows - sequence.start_position;
  const int64_t count = std::min<int64_t>(num_rows, sequence.num_tokens);
  if (count <= 0) return;
  const int64_t begin = sequence.first_token;
  std::fill_n(token_ids_.begin() + begin, count, 0);
  given_embeddings_.push_back({.begin = begin,
                               .count = count,
                               .rows = sequence.prompt_embeds->row(sequence.start_position)});
}

void BatchBuilder::append_sequence(const ScheduledSequence& sequence,
                                   std::span<const int32_t> token_ids) {
  batch_.has_awaited |= sequence.awaited_row >= 0;
  for (int64_t position = sequence.start_position; const int32_t token_id : token_ids) {
    token_ids_[num_tokens_] = std::max(token_id, 0);
    awaited_rows_[num_tokens_] = sequence.awaited_row;
    positions_[num_tokens_] = static_cast<int32_t>(position);
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].slots[num_tokens_] =
          sequence.block_tables[g][position / block_size_] * block_size_ + position % block_size_;
    }
    ++num_tokens_;
    ++position;
  }
  append_given_rows(sequence);
  adapters_[num_sequences_] = sequence.adapter;
  state_slots_[num_sequences_] = sequence.state_slot;
  kv_lens_[num_sequences_] = static_cast<int32_t>(sequence.end_position());
  query_starts_[++num_sequences_] = static_cast<int32_t>(num_tokens_);
}

void BatchBuilder::fill_block_tables(const ScheduledSequence& sequence, int64_t max_blocks) {
  const auto used = static_cast<size_t>((sequence.end_position() + block_size_ - 1) / block_size_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto row = groups_[g].block_tables.subspan(
        num_sequences_ * static_cast<size_t>(max_blocks), static_cast<size_t>(max_blocks));
    const std::span<const int32_t> blocks = sequence.block_tables[g];
    // What has left the window is not looked at, so that any block will do. Nor is what comes after
    // the last: it stays as it is, since a table is as wide as the longest of the batch.
    std::ranges::transform(blocks.first(used), row.begin(),
                           [](int32_t block) { return std::max(block, 0); });
  }
}

// Copied once a sequence: each of its rows sees a prefix.
std::span<const int32_t> BatchBuilder::with_drafts(const StepPlan& plan, const LogitRow& row) {
  if (context_sequence_ != row.sequence_idx) {
    context_sequence_ = row.sequence_idx;
    if (contexts_.size() == num_contexts_) contexts_.emplace_back();
    std::vector<int32_t>& context = contexts_[num_contexts_++];
    const ScheduledSequence& sequence = plan.sequences[static_cast<size_t>(row.sequence_idx)];
    const std::span<const int32_t> drafted =
        plan.tokens_of(sequence).last(static_cast<size_t>(sequence.num_drafted));
    context.assign(row.token_ids.begin(), row.token_ids.end());
    context.insert(context.end(), drafted.begin(), drafted.end());
  }
  return std::span<const int32_t>(contexts_[num_contexts_ - 1])
      .first(row.token_ids.size() + static_cast<size_t>(row.num_drafted));
}

void BatchBuilder::append_row(const StepPlan& plan, const LogitRow& row) {
  logit_rows_[num_rows_] = query_starts_[static_cast<size_t>(row.sequence_idx)] + row.token_offset;
  draws_[num_rows_] = {.draw = row.params->draw, .seed = row.seed, .position = row.position};
  ++num_rows_;
  const bool sees_drafts = row.num_drafted > 0 && !row.only_draws();
  // A state cannot take tokens back.
  const bool can_run_again =
      plan.sequences[static_cast<size_t>(row.sequence_idx)].state_slot == kNoSlot;
  const bool is_late = awaited_rows_[static_cast<size_t>(logit_rows_[num_rows_ - 1])] >= 0;
  batch_.sample_tasks.push_back({.request_id = row.request_id,
                                 .sample_index = row.sample_index,
                                 .params = row.params,
                                 .seed = row.seed,
                                 .position = row.position,
                                 .given_token_id = row.given_token_id,
                                 .token_ids = sees_drafts ? with_drafts(plan, row) : row.token_ids,
                                 .num_prompt_tokens = row.num_prompt_tokens,
                                 .num_drafted_tokens = sees_drafts ? row.num_drafted : 0,
                                 .late_token = is_late ? logit_rows_[num_rows_ - 1] : -1,
                                 .only_draws = row.only_draws(),
                                 .banned_token_ids = row.banned_token_ids,
                                 .can_await_mask = can_run_again});
}

void BatchBuilder::append_pooled(const StepPlan& plan, const PooledSequence& pooled) {
  if (pooled.output->params.task != PoolingTask::kTokenLogits) return;
  const size_t idx = static_cast<size_t>(pooled.sequence_idx);
  batch_.pooled_rows.push_back({.output = pooled.output,
                                .begin = query_starts_[idx],
                                .count = query_starts_[idx + 1] - query_starts_[idx],
                                .position = plan.sequences[idx].start_position});
}

void BatchBuilder::fill_up(const BatchShape& shape) {
  const auto width = static_cast<size_t>(shape.max_blocks);
  while (num_sequences_ < kv_lens_.size()) {
    token_ids_[num_tokens_] = positions_[num_tokens_] = 0;
    awaited_rows_[num_tokens_] = -1;
    for (Group& group : groups_) {
      group.slots[num_tokens_] = -1;
      group.block_tables[num_sequences_ * width] = 0;  // a context of one has one block
    }
    adapters_[num_sequences_] = state_slots_[num_sequences_] = -1;
    kv_lens_[num_sequences_] = 1;
    query_starts_[++num_sequences_] = static_cast<int32_t>(++num_tokens_);
  }
  for (; num_rows_ < logit_rows_.size(); ++num_rows_) {
    logit_rows_[num_rows_] = static_cast<int32_t>(num_rows_);
    draws_[num_rows_] = {.draw = {.temperature = 0}};
  }
}

StepBatch& BatchBuilder::build(const StepPlan& plan, const BatchShape& shape,
                               std::span<std::byte> block) {
  check_internal(std::ssize(block) >= num_bytes(shape), "a batch's arrays fit their block");
  std::byte* next = block.data();
  lay_out(shape, [&]<class T>(std::span<T>& array, int64_t count) {
    array = {reinterpret_cast<T*>(next), static_cast<size_t>(count)};
    next += array.size_bytes();
  });
  num_tokens_ = num_sequences_ = num_rows_ = 0;
  given_embeddings_.clear();
  num_contexts_ = 0;
  context_sequence_ = -1;
  batch_.sample_tasks.clear();
  batch_.pooled_rows.clear();
  batch_.copies.clear();
  batch_.has_awaited = false;
  query_starts_[0] = 0;
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    const ScheduledSequence& sequence = plan.sequences[i];
    if (i + kPrefetched < plan.sequences.size()) prefetch_tables(plan.sequences[i + kPrefetched]);
    fill_block_tables(sequence, shape.max_blocks);
    append_sequence(sequence, plan.tokens_of(sequence));
  }
  for (const LogitRow& row : plan.logit_rows) append_row(plan, row);
  for (const PooledSequence& pooled : plan.pooled) append_pooled(plan, pooled);
  fill_up(shape);
  for (const BlockCopy& copy : plan.copies)
    batch_.copies.emplace_back(copy.source, copy.destination);
  wanted_layers_ = plan.wanted_layers;
  std::iota(wanted_tokens_.begin(), wanted_tokens_.end(), 0);
  for (size_t g = 0; g < groups_.size(); ++g)
    group_inputs_[g] = {.slots = groups_[g].slots, .block_tables = groups_[g].block_tables};
  batch_.input = {.token_ids = token_ids_,
                  .given_embeddings = given_embeddings_,
                  .positions = positions_,
                  .query_starts = query_starts_,
                  .kv_lens = kv_lens_,
                  .max_blocks = shape.max_blocks,
                  .kv_groups = group_inputs_,
                  .adapters = adapters_,
                  .state_slots = state_slots_,
                  .logit_rows = logit_rows_,
                  .wanted_layers = wanted_layers_,
                  .wanted_tokens = wanted_layers_.empty() ? std::span<int32_t>() : wanted_tokens_};
  batch_.awaited_rows = awaited_rows_;
  batch_.draws = draws_;
  return batch_;
}

}  // namespace llmserve
