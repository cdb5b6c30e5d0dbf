// commit(): what a step's tokens change.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "core/prefetch.h"
#include "scheduler/scheduler.h"

namespace llmserve {
namespace {

// Twice as many sequences may run again after so many steps that went well: a second or so, and
// from one to 256 in 256 steps.
constexpr int32_t kStepsToGrow = 32;

bool belongs_to(const LogitRow& row, size_t sequence_idx) {
  return static_cast<size_t>(row.sequence_idx) == sequence_idx;
}

}  // namespace

StepResult& Scheduler::commit(const SampledTokens& sampled) {
  check_internal(flights_.size() > 0, "a commit follows its plan");
  committed_ = &flights_.oldest();
  check_internal(sampled.rows.size() == committed_->plan.logit_rows.size(),
                 "the sampler gives one row for each logit row");
  prefetch_books(*committed_);
  count_step(*committed_);
  kv_cache_.give_back_replaced();  // by the commit before; this step was the last to read them
  const StepPlan& plan = committed_->plan;
  size_t row = 0;
  for (size_t i = 0; i < committed_->sequences.size(); ++i) {
    const size_t first_row = row;
    while (row < plan.logit_rows.size() && belongs_to(plan.logit_rows[row], i)) ++row;
    Sequence& sequence = *committed_->sequences[i];
    --sequence.num_in_flight;
    const int64_t num_computed = plan.sequences[i].end_position();
    if (sequence.is_ended()) {  // with the step before
      if (sequence.num_in_flight == 0) let_go(sequence);
    } else if (num_computed <= sequence.num_tokens()) {  // or aborted, its last token not taken
      sequence.num_computed = num_computed;
      commit_sequence(sequence, sampled, first_row, row);
    }
  }
  for (RequestEntry* entry : std::exchange(complete_beams_, {})) advance_beams(*entry);
  flights_.retire();
  if (flights_.is_empty()) kv_cache_.give_back_replaced();
  std::erase_if(running_, [](const Sequence* s) { return s->is_ended(); });
  place_forks();
  for (const RequestId id : std::exchange(aborts_, {})) abort(id);
  drop_finished();
  // Swapped, so that both keep their memory from step to step.
  result_.events.clear();
  result_.events.swap(events_);
  result_.progress.clear();
  result_.progress.swap(progress_);
  return result_;
}

void Scheduler::recycle(StepResult& result) {
  for (TokenEvent& event : result.events) {
    if (event.token_ids.capacity() == 0 || spare_token_ids_.size() >= running_.size()) continue;
    event.token_ids.clear();
    spare_token_ids_.push_back(std::move(event.token_ids));
  }
  result.events.clear();
}

// What this commit and the schedule() after it touch of the sequences that were in the step.
void Scheduler::prefetch_books(const Flight& flight) const {
  prefetch(flight.plan.logit_rows.data(), flight.plan.logit_rows.size() * sizeof(LogitRow));
  prefetch(flight.plan.sequences.data(), flight.plan.sequences.size() * sizeof(ScheduledSequence));
  for (const Sequence* sequence : flight.sequences) prefetch(sequence, Sequence::kNumHotBytes);
  size_t num_events = 0;
  for (const Sequence* sequence : flight.sequences) {
    prefetch(sequence->token_ids.data() + sequence->token_ids.size(), 1);
    prefetch(sequence->table.blocks.data(), 1);
    if (!sequence->stop_token_ids.empty()) prefetch(sequence->stop_token_ids.data(), 1);
    if (!sequence->is_plain) prefetch(*sequence->context);
    if (sequence->makes_text) prefetch(sequence->text);
    if (sequence->is_streamed) ++num_events;
  }
  prefetch(events_.data(), std::min(events_.capacity(), num_events) * sizeof(TokenEvent));
  prefetch(progress_.data(),
           std::min(progress_.capacity(), flight.sequences.size()) * sizeof(TokenProgress));
  for (const Sequence* sequence : flight.sequences) kv_cache_.prefetch_newest(sequence->table);
}

void Scheduler::count_step(const Flight& flight) {
  // Where steps overlap, none counts time that an earlier one has.
  const int64_t start_us = std::max(flight.start_us, std::exchange(now_us_, clock_.now_us()));
  if (flight.plan.is_empty()) return;
  const int64_t elapsed_us = now_us_ - start_us;
  const bool is_prefill = flight.plan.num_prefill_tokens > 0;
  ++(is_prefill ? counters_.num_prefill_steps : counters_.num_decode_steps);
  (is_prefill ? counters_.prefill_us : counters_.decode_us) += elapsed_us;
  counters_.num_prefill_tokens += flight.plan.num_prefill_tokens;
  counters_.num_recomputed_tokens += flight.plan.num_recomputed_tokens;
  if (is_prefill) {
    pace_.note_step(flight.plan.num_tokens(), elapsed_us);
    spread_.note_step(flight.plan.num_tokens(), elapsed_us);
  }
  if (num_seats_ < config_.max_num_seqs) give_back_seats();
}

void Scheduler::give_back_seats() {
  if (++num_good_steps_ < kStepsToGrow) return;
  num_good_steps_ = 0;
  num_seats_ = std::min<int64_t>(config_.max_num_seqs, 2 * num_seats_);
}

// Rows [row, end_row) are the sequence's: first those of its prompt, then one a sample.
void Scheduler::commit_sequence(Sequence& sequence, const SampledTokens& sampled, size_t row,
                                size_t end_row) {
  kv_cache_.commit(sequence.table, sequence.token_ids, sequence.num_computed);
  if (sequence.is_abort_requested) return;
  if (row < end_row && committed_->plan.logit_rows[end_row - 1].is_awaitable)
    --sequence.num_awaited;
  for (; row < end_row && committed_->plan.logit_rows[row].given_token_id >= 0; ++row) {
    if (!score_prompt_token(sequence, sampled, sampled.rows[row])) return;
  }
  if (!sequence.is_plain && sequence.context->request.pooled) {
    if (sequence.num_to_run() == 0) finish_pooled(sequence);
    return;
  }
  if (row == end_row) return;
  if (!sequence.is_plain && sequence.context->request.beam_search) {
    const SampledToken& token = sampled.rows[row];
    return hold_candidates(sequence,
                           token.is_valid ? sampled.top(token) : std::span<const TokenLogprob>());
  }
  // All forks before any token: they share the prompt as it is now.
  const size_t first_fork = forks_.size();
  const int32_t num_samples = std::exchange(sequence.num_samples, 1);
  for (int32_t i = 1; i < num_samples; ++i) fork(sequence, i);
  append_token(sequence, sampled, sampled.rows[row]);
  for (int32_t i = 1; i < num_samples; ++i) {
    append_token(*forks_[first_fork + i - 1], sampled, sampled.rows[row + i]);
  }
}

// False: that was the sequence's end.
bool Scheduler::score_prompt_token(Sequence& sequence, const SampledTokens& sampled,
                                   const SampledToken& token) {
  RequestContext& context = *sequence.context;
  if (!token.is_valid) {
    finish(sequence, FinishReason::kError, not_finite_error(context.num_scored + 1));
    return false;
  }
  const auto top = sampled.top(token);
  context.prompt_logprobs.push_back({token.token_id, token.logprob, token.rank});
  context.prompt_top_logprobs.emplace_back(top.begin(), top.end());
  ++context.num_scored;
  return true;
}

void Scheduler::fork(Sequence& sequence, int32_t sample_index) {
  RequestEntry& entry = requests_.at(sequence.request_id);
  entry.sequences.push_back(make_sequence(entry.context, sample_index));
  Sequence& child = *entry.sequences.back();
  child.state = SequenceState::kRunning;
  child.token_ids = sequence.token_ids;
  child.num_computed = child.num_scheduled = sequence.num_computed;
  child.was_admitted = true;
  child.num_cached_tokens = sequence.num_cached_tokens;
  child.num_prompt_seen = sequence.num_prompt_seen;
  child.times = sequence.times;
  child.beam = sequence.beam;
  kv_cache_.fork(sequence.table, child.table);
  forks_.push_back(&child);
}

// Forks run on where there is a place; the others queue, to start over from the prefix cache.
void Scheduler::place_forks() {
  for (Sequence* child : std::exchange(forks_, {})) {
    if (child->is_ended()) continue;
    const bool has_seat = static_cast<int64_t>(running_.size()) < num_seats_;
    if (has_seat && child->num_computed > 0) {
      running_.insert(std::ranges::upper_bound(running_, child, ServedBefore()), child);
    } else {
      send_to_queue(*child);
    }
  }
}

void Scheduler::finish_pooled(Sequence& sequence) {
  const std::shared_ptr<PooledOutput>& pooled = sequence.context->request.pooled;
  if (!pooled->is_finite) {
    return finish(sequence, FinishReason::kError, not_finite_error(sequence.num_tokens()));
  }
  sequence.times.first_token_us = sequence.times.last_token_us = now_us_;
  TokenEvent& event = add_event(sequence);
  event.pooled = pooled;
  event.finish_reason = FinishReason::kStop;
  retire(sequence, event);
}

// Where the news of a token go.
TokenEvent& Scheduler::news_of(Sequence& sequence) {
  if (sequence.is_streamed) return add_event(sequence);
  if (!sequence.withheld) sequence.withheld = std::make_unique<TokenEvent>();
  return *sequence.withheld;
}

void Scheduler::note_progress(const Sequence& sequence, int64_t previous_us) {
  progress_.push_back({.request_id = sequence.request_id,
                       .sample_index = sequence.sample_index,
                       .num_preemptions = sequence.num_preemptions,
                       .num_cached_tokens = sequence.num_cached_tokens,
                       .previous_us = previous_us,
                       .times = sequence.times});
}

void Scheduler::append_token(Sequence& sequence, const SampledTokens& sampled,
                             const SampledToken& token) {
  if (!token.is_valid) {
    if (token.error_idx >= 0)
      finish(sequence, FinishReason::kInvalid,
             sampled.errors[static_cast<size_t>(token.error_idx)]);
    else
      finish(sequence, FinishReason::kError, not_finite_error(sequence.num_tokens()));
    return;
  }
  const bool is_first = sequence.num_generated() == 0;
  const int64_t previous_us = is_first ? 0 : sequence.times.last_token_us;
  sequence.token_ids.push_back(token.token_id);
  sequence.times.last_token_us = now_us_;
  if (is_first) sequence.times.first_token_us = now_us_;
  ++counters_.num_generation_tokens;
  note_progress(sequence, previous_us);
  TokenEvent& news = news_of(sequence);
  if (sequence.is_streamed) news.token_ids.push_back(token.token_id);
  if (!sequence.is_plain) report_logprobs(sequence, sampled, token, news);
  const FinishReason reason = check_end(sequence, token.is_end, news);
  if (reason == FinishReason::kNone) return;
  TokenEvent& last = sequence.is_streamed ? news : add_event(sequence);
  last.finish_reason = reason;
  retire(sequence, last);
}

void Scheduler::report_logprobs(Sequence& sequence, const SampledTokens& sampled,
                                const SampledToken& token, TokenEvent& news) {
  if (sequence.sample_index == 0 && sequence.num_generated() == 1) {
    news.prompt_logprobs = std::move(sequence.context->prompt_logprobs);
    news.prompt_top_logprobs = std::move(sequence.context->prompt_top_logprobs);
  }
  if (!sequence.params().has_logprobs()) return;
  const auto top = sampled.top(token);
  news.logprobs.push_back({token.token_id, token.logprob, token.rank});
  news.top_logprobs.emplace_back(top.begin(), top.end());
}

FinishReason Scheduler::check_end(Sequence& sequence, bool is_end, TokenEvent& event) const {
  const int32_t token_id = sequence.token_ids.back();
  const bool can_stop = sequence.num_generated() >= sequence.min_tokens;
  const bool is_stop_token =
      is_end || (can_stop && std::ranges::binary_search(sequence.stop_token_ids, token_id));
  const bool is_full = sequence.num_generated() >= sequence.max_tokens ||
                       sequence.num_tokens() >= config_.max_model_len;
  const bool is_repeating = !sequence.is_plain && sequence.repetition &&
                            sequence.repetition->append(sequence.generated()) && can_stop;
  if (is_stop_token) event.stop_token_id = token_id;
  if (sequence.makes_text) {
    std::optional<size_t> stop;
    // The text of a stop token is not the user's, unless asked for like that of a stop string.
    if (!is_stop_token || sequence.params().include_stop_str_in_output) {
      stop = sequence.text->append(token_id, can_stop, event.text);
    }
    if (!stop && (is_stop_token || is_repeating || is_full))
      stop = sequence.text->flush(event.text);
    if (stop) {
      event.stop_string = sequence.context->stop_strings.string(*stop);
      return FinishReason::kStop;
    }
  }
  if (is_stop_token) return FinishReason::kStop;
  if (is_repeating) {
    event.stop_string = kRepetitionDetected;
    return FinishReason::kStop;
  }
  return is_full ? FinishReason::kLength : FinishReason::kNone;
}

}  // namespace llmserve
