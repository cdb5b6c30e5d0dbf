#include "bindings/stepped_scheduler.h"

#include <utility>

#include "core/error.h"

namespace llmserve {

StepPlanRecord::StepPlanRecord(const StepPlan& given) : plan(given) {
  sequences.reserve(plan.sequences.size());
  for (ScheduledSequence& sequence : plan.sequences) {
    const std::span<const int32_t> tokens = plan.tokens_of(sequence);
    ScheduledSequenceRecord& record = sequences.emplace_back(
        ScheduledSequenceRecord{sequence,
                                {tokens.begin(), tokens.end()},
                                {sequence.block_tables.begin(), sequence.block_tables.end()}});
    record.block_tables = sequence.block_tables = record.tables;
    record.prompt_embeds = sequence.prompt_embeds = nullptr;
  }
  for (LogitRow& row : plan.logit_rows) {
    row.banned_token_ids =
        banned_token_ids.emplace_back(row.banned_token_ids.begin(), row.banned_token_ids.end());
    row.params = &params.emplace_back(*row.params);
  }
  plan.pooled.clear();
}

SteppedScheduler::SteppedScheduler(const SchedulerConfig& config, const CacheConfig& cache,
                                   std::optional<Vocabulary> vocabulary, SchedulerOptions options)
    : vocabulary_(std::move(vocabulary)),
      scheduler_(config, cache, vocabulary_ ? &*vocabulary_ : nullptr, clock_, std::move(options)) {
}

void SteppedScheduler::check_token_ids(const char* field,
                                       std::span<const int32_t> token_ids) const {
  for (size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids[i] < 0 || (vocabulary_ && token_ids[i] >= vocabulary_->size())) {
      throw InvalidArgument(concat(field, ": expected token ids of at least 0",
                                   vocabulary_ ? concat(" and below ", vocabulary_->size()) : "",
                                   ", got ", token_ids[i], " at ", i));
    }
  }
}

void SteppedScheduler::add(Request request) {
  check_token_ids("prompt_token_ids", request.prompt_token_ids);
  request.seed = request.params.seed.value_or(0);
  request.arrival_us = clock_.now_us();
  scheduler_.admission().admit(request);
  scheduler_.add(std::move(request));
}

std::unique_ptr<StepPlanRecord> SteppedScheduler::schedule() {
  if (scheduler_.num_in_flight() == scheduler_.max_in_flight()) {
    throw InvalidArgument("schedule() and commit() alternate: commit the last plan's tokens first");
  }
  auto record = std::make_unique<StepPlanRecord>(scheduler_.schedule());
  num_rows_due_.push_back(record->plan.logit_rows.size());
  return record;
}

std::vector<TokenEvent> SteppedScheduler::commit(const SampledTokens& sampled) {
  if (num_rows_due_.empty()) {
    throw InvalidArgument("schedule() and commit() alternate: there is no plan to commit");
  }
  if (sampled.rows.size() != num_rows_due_.front()) {
    throw InvalidArgument(concat("commit: expected ", num_rows_due_.front(),
                                 " token ids, one for each of the plan's logit_rows, got ",
                                 sampled.rows.size()));
  }
  for (const SampledToken& row : sampled.rows)
    if (row.is_valid) check_token_ids("commit", {&row.token_id, 1});
  num_rows_due_.pop_front();
  return scheduler_.commit(sampled).events;
}

void SteppedScheduler::preempt(RequestId id) {
  if (!num_rows_due_.empty()) throw InvalidArgument("preempt between steps: commit the plan first");
  scheduler_.preempt(id);
}

void SteppedScheduler::fail_step(const std::string& reason) {
  if (num_rows_due_.empty())
    throw InvalidArgument("fail_step() follows schedule(): there is no plan");
  num_rows_due_.clear();
  scheduler_.fail_step(reason);
}

void SteppedScheduler::lose_rank(int32_t rank) {
  num_rows_due_.clear();
  scheduler_.take(RankLost{.rank = rank});
}

void SteppedScheduler::fail(const std::string& reason) {
  num_rows_due_.clear();
  scheduler_.fail(reason);
}

std::optional<int64_t> SteppedScheduler::wake_us() const {
  const int64_t wake_us = scheduler_.wake_us();
  if (wake_us == SchedulingPolicy::kNever) return std::nullopt;
  return wake_us;
}

std::vector<SequenceRecord> SteppedScheduler::sequences() const {
  std::vector<SequenceRecord> records;
  for (const Sequence* sequence : scheduler_.sequences()) {
    records.push_back({.request_id = sequence->context->request.id,
                       .sample_index = sequence->sample_index,
                       .state = std::string(name(sequence->state)),
                       .token_ids = sequence->token_ids,
                       .num_prompt_tokens = sequence->num_prompt_tokens,
                       .num_computed = sequence->num_computed,
                       .num_scheduled = sequence->num_scheduled,
                       .num_preemptions = sequence->num_preemptions,
                       .block_tables = sequence->table.blocks});
  }
  return records;
}

EngineMetrics SteppedScheduler::metrics() const {
  EngineMetrics metrics;
  scheduler_.fill_metrics(metrics);
  return metrics;
}

int32_t SteppedScheduler::ref_count(int32_t block) const {
  const int32_t num_blocks = scheduler_.kv_cache().num_blocks();
  if (block < 0 || block >= num_blocks)
    throw InvalidArgument(concat("block must be in [0, ", num_blocks, "), got ", block));
  return scheduler_.kv_cache().ref_count(block);
}

void SteppedScheduler::advance_us(int64_t delta_us) {
  if (delta_us < 0) throw InvalidArgument(concat("time never goes back, got ", delta_us, " us"));
  clock_.advance_us(delta_us);
}

}  // namespace llmserve
