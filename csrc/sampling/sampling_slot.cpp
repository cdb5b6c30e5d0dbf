#include "sampling/sampling_slot.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "core/error.h"
#include "sampling/logits_processor.h"

namespace llmserve {

bool SamplingSlot::is_needed(const SamplingParams& params) {
  return params.draw.has_penalties() || params.allowed_token_ids || params.thinking_budget ||
         !params.logit_bias.empty() || !params.bad_words.empty() ||
         !params.logits_processors.empty();
}

SamplingSlot::SamplingSlot(const SamplingParams& params, int64_t vocab_size) : params_(params) {
  if (params.thinking_budget) thinking_.emplace(*params.thinking_budget);
  for (const auto& [id, bias] : params.logit_bias) biases_.push_back({id, bias});
  if (params.allowed_token_ids) {
    allowed_.resize(static_cast<size_t>((vocab_size + 31) / 32), 0);
    for (const int32_t id : *params.allowed_token_ids)
      allowed_[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
  }
}

void SamplingSlot::prepare(const SampleTask& task, const ConstTensor& logits, Memory& memory,
                           SampleRow& row) {
  take_in(task);
  const auto num_drafted = static_cast<size_t>(task.num_drafted_tokens);
  if (rows_.size() <= num_drafted) rows_.resize(num_drafted + 1);  // what spans point to stays
  RowEdits& edits = rows_[num_drafted];
  row.biases = biases_;
  row.allowed = allow(task, edits);
  row.counts = count(task, edits);
  if (thinking_) row.forced_token_id = forced_token_id(task);
  if (row.forced_token_id >= 0) return;
  ban(task, edits);
  row.banned_token_ids = edits.banned;
  if (params_.logits_processors.empty()) return;
  process(task, logits, memory, edits);
  row.draw_logits =
      ConstTensor(edits.draw_logits.data(), DType::kF32, {std::ssize(edits.draw_logits)});
}

void SamplingSlot::take_in(const SampleTask& task) {
  // Of the prompt only the repetition penalty wants to know.
  const bool counts_prompt = params_.draw.repetition_penalty != 1;
  const std::span<const int32_t> committed = task.committed_token_ids();
  for (; num_seen_ < committed.size(); ++num_seen_) {
    const bool is_generated = static_cast<int64_t>(num_seen_) >= task.num_prompt_tokens;
    if (committed[num_seen_] == kNoTokenId) continue;  // of a prompt of embeddings
    if (params_.draw.has_penalties() && (is_generated || counts_prompt))
      counts_.add(committed[num_seen_], is_generated);
    if (thinking_) thinking_->add(committed.first(num_seen_ + 1), is_generated);
  }
}

std::span<const TokenCount> SamplingSlot::count(const SampleTask& task, RowEdits& edits) const {
  if (task.num_drafted_tokens == 0 || !params_.draw.has_penalties()) return counts_.all();
  counts_.all_with(task.token_ids.last(static_cast<size_t>(task.num_drafted_tokens)), edits.counts);
  return edits.counts;
}

int32_t SamplingSlot::forced_token_id(const SampleTask& task) const {
  ThinkingSection thinking = *thinking_;
  for (size_t n = task.committed_token_ids().size(); n < task.token_ids.size(); ++n)
    thinking.add(task.token_ids.first(n + 1), /*is_generated=*/true);
  return thinking.forced_token_id(task.token_ids);
}

std::span<const uint32_t> SamplingSlot::allow(const SampleTask& task, RowEdits& edits) const {
  if (allowed_.empty()) return task.allowed;
  if (task.allowed.empty()) return allowed_;
  edits.allowed.resize(allowed_.size());
  std::ranges::transform(allowed_, task.allowed, edits.allowed.begin(), std::bit_and<>());
  return edits.allowed;
}

// The last token of each bad word whose others the output ends in.
void SamplingSlot::ban(const SampleTask& task, RowEdits& edits) const {
  edits.banned.assign(task.banned_token_ids.begin(), task.banned_token_ids.end());
  const auto output = task.token_ids.subspan(static_cast<size_t>(task.num_prompt_tokens));
  for (const std::vector<int32_t>& word : params_.bad_words) {
    const size_t num_before = word.size() - 1;
    if (num_before <= output.size() &&
        std::equal(word.begin(), word.end() - 1, output.end() - static_cast<int64_t>(num_before)))
      edits.banned.push_back(word.back());
  }
}

void SamplingSlot::process(const SampleTask& task, const ConstTensor& logits, Memory& memory,
                           RowEdits& edits) const {
  std::vector<float>& draw_logits = edits.draw_logits;
  draw_logits.resize(static_cast<size_t>(logits.shape[0]));
  memory.copy_to_host(draw_logits.data(), logits.data, logits.num_bytes());
  for (const auto& processor : params_.logits_processors)
    processor->process(task.token_ids, draw_logits);
  const auto bad = std::ranges::find_if(draw_logits, [](float value) {
    return std::isnan(value) || value == std::numeric_limits<float>::infinity();
  });
  if (bad != draw_logits.end()) {
    throw InvalidArgument(concat("logits_processors left ", *bad, " for token ",
                                 bad - draw_logits.begin(), " at position ", task.position,
                                 "; they may leave numbers and -inf"));
  }
}

}  // namespace llmserve
