#include "sampling/sampler.h"

#include "core/error.h"
#include "sampling/rejection.h"

namespace llmserve {

SampleRow Sampler::make_row(const SampleTask& task, const ConstTensor& logits, std::string& error) {
  const SamplingParams& params = *task.params;
  if (task.given_token_id >= 0)
    return {.forced_token_id = task.given_token_id, .num_top = *params.prompt_logprobs};
  SampleRow row{.draw = params.draw,
                .seed = task.seed,
                .position = task.position,
                .allowed = task.allowed,
                .banned_token_ids = task.banned_token_ids,
                .reported_token_ids = params.logprob_token_ids};
  const int32_t all = static_cast<int32_t>(logits.shape[0]);
  if (params.has_logprobs()) row.num_top = params.logprobs.value_or(0);
  if (params.logprobs && *params.logprobs < 0) row.num_top = all;
  if (task.awaits_mask) return {.forced_token_id = 0};
  if (!task.mask_error.empty()) {
    error = task.mask_error;
    return {.forced_token_id = 0};
  }
  row.forced_token_id = task.end_token_id;
  if (!SamplingSlot::is_needed(params) || task.end_token_id >= 0) return row;
  const auto place =
      slots_.try_emplace({task.request_id, task.sample_index}, params, logits.shape[0]).first;
  try {
    SamplingSlot& slot = place->second;
    slot.prepare(task, logits, backend_.memory(), row);
    if (params.draw.has_penalties() && task.num_drafted_tokens == 0)
      kept_.back() = {.id = slot.counts().id(), .counted = slot.counts().added()};
  } catch (const std::exception& failure) {  // a logits processor's: its request fails alone
    error = failure.what();
    row = {.forced_token_id = 0};
  }
  return row;
}

// The token is drawn here, and forced. What cannot be drawn from is left to the op, which tells.
void Sampler::draw_by_rule(const SampleTask& task, const ConstTensor& logits, SampleRow& row) {
  if (row.forced_token_id >= 0 || row.draw.is_greedy()) return;
  host_logits_.resize(static_cast<size_t>(logits.shape[0]));
  backend_.memory().copy_to_host(host_logits_.data(), logits.data, logits.num_bytes());
  std::vector<float>& probabilities = task.drawn_from ? *task.drawn_from : probabilities_;
  if (!fill_probabilities(host_logits_, row, probabilities)) {
    probabilities.clear();
    return;
  }
  row.forced_token_id = task.drawn_from
                            ? draw_from(probabilities, task.seed, task.position, DrawStream::kGuess)
                            : draw_after_guess(probabilities, task.guess, task.guess_probabilities,
                                               task.seed, task.position);
}

std::span<const SampleRow> Sampler::ask(const ConstTensor& logits,
                                        std::span<const SampleTask> tasks,
                                        std::span<PendingSample> pending) {
  rows_.clear();
  kept_.clear();
  for (size_t i = 0; i < tasks.size(); ++i) {
    const float* row = logits.as<float>() + static_cast<int64_t>(i) * logits.strides[0];
    const ConstTensor row_logits(row, DType::kF32, {logits.shape[1]});
    pending[i] = {.position = tasks[i].position,
                  .is_end = tasks[i].end_token_id >= 0,
                  .awaits_mask = tasks[i].awaits_mask};
    kept_.emplace_back();
    SampleRow& made = rows_.emplace_back(make_row(tasks[i], row_logits, pending[i].error));
    if (tasks[i].guess >= 0 || tasks[i].drawn_from != nullptr)
      draw_by_rule(tasks[i], row_logits, made);
  }
  return rows_;
}

void Sampler::sample(const ConstTensor& logits, std::span<const SampleTask> tasks,
                     SampledTokens& out) {
  if (drawn_.size() < tasks.size()) {
    drawn_.resize(tasks.size());
    pending_.resize(tasks.size());
  }
  const std::span<SampledRow> drawn(drawn_.data(), tasks.size());
  backend_.sample({.logits = logits, .rows = ask(logits, tasks, pending_), .out = drawn});
  for (size_t i = 0; i < tasks.size(); ++i) append(drawn[i], pending_[i], out);
}

void Sampler::append(const SampledRow& row, const PendingSample& pending, SampledTokens& out) {
  SampledToken token{.token_id = row.token_id,
                     .logprob = row.logprob,
                     .rank = row.rank,
                     .is_valid = row.is_valid && pending.error.empty(),
                     .is_end = pending.is_end,
                     .awaits_mask = pending.awaits_mask};
  if (!token.is_valid && row.is_raw_valid) {
    token.error_idx = static_cast<int32_t>(out.errors.size());
    out.errors.push_back(
        !pending.error.empty()
            ? pending.error
            : concat("no token is left to draw at position ", pending.position,
                     ": structured_outputs, logits_processors, allowed_token_ids, bad_words, "
                     "logit_bias, the penalties and min_tokens together rule out all; allow more"));
  }
  token.top_begin = static_cast<int32_t>(out.tops.size());
  token.num_top = static_cast<int32_t>(row.top.size() + row.reported.size());
  for (const auto* tokens : {&row.top, &row.reported}) {
    for (const TopToken& top : *tokens)
      out.tops.push_back({.token_id = top.token_id, .logprob = top.logprob, .rank = top.rank});
  }
  out.rows.push_back(token);
}

void Sampler::forget(RequestId request_id, int32_t sample_index) {
  const auto place = slots_.find({request_id, sample_index});
  if (place == slots_.end()) return;
  if (DeviceSteps* const steps = backend_.steps())
    steps->forget_counts(place->second.counts().id());
  slots_.erase(place);
}

}  // namespace llmserve
