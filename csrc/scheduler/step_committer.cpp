#include "scheduler/step_committer.h"

#include <algorithm>
#include <utility>

#include "core/prefetch.h"

namespace llmserve {
namespace {

bool belongs_to(const LogitRow& row, size_t sequence_idx) {
  return static_cast<size_t>(row.sequence_idx) == sequence_idx;
}

}  // namespace

void StepCommitter::commit(const StepFlight& flight, const SampledTokens& sampled, int64_t now_us) {
  plan_ = &flight.plan;
  sampled_ = &sampled;
  now_us_ = now_us;
  prefetch_books(flight);
  kv_cache_.give_back_replaced(plan_->step_id);  // no step after this one reads them
  size_t row = 0;
  for (size_t i = 0; i < flight.sequences.size(); ++i) {
    const size_t first_row = row;
    while (row < plan_->logit_rows.size() && belongs_to(plan_->logit_rows[row], i)) ++row;
    Sequence& sequence = *flight.sequences[i];
    const ScheduledSequence& scheduled = plan_->sequences[i];
    if (scheduled.branch_of >= 0) continue;  // looked at with that one
    --sequence.num_in_flight;
    Share share{
        .scheduled = &scheduled, .drafts = drafts_of(scheduled), .row = first_row, .end_row = row};
    if (!sequence.branches.empty()) share = best_path(sequence, share);
    if (sequence.is_ended()) {  // with the step before
      book_.leave_flight(sequence);
    } else if (scheduled.num_known() <= sequence.num_tokens()) {  // or aborted before its token
      commit(sequence, share);
    }
  }
  num_generation_tokens_ += beams_.advance(now_us_);
}

std::span<const int32_t> StepCommitter::drafts_of(const ScheduledSequence& scheduled) const {
  return plan_->tokens_of(scheduled).last(static_cast<size_t>(scheduled.num_drafted));
}

// Guesses that are what was drawn in their place, each after the ones before it.
int32_t StepCommitter::count_right(const Share& share) const {
  int32_t count = 0;
  for (size_t i = 0; i < share.drafts.size(); ++i, ++count) {
    const SampledToken& token = sampled_->rows[share.row + i];
    if (!token.is_valid || token.token_id != share.drafts[i]) break;
  }
  return count;
}

// Rows of a branch are plain rows: as far as its guesses are right, so are all draws behind them,
// and its blocks hold what the sequence's own would. So it does not matter which path is taken but
// for how far it goes. The blocks of the others go back.
StepCommitter::Share StepCommitter::best_path(Sequence& sequence, Share share) {
  DraftBranch* best = nullptr;
  int32_t most = count_right(share);
  int32_t num_all = static_cast<int32_t>(share.drafts.size());
  for (DraftBranch& branch : sequence.branches) {
    const ScheduledSequence& scheduled = plan_->sequences[static_cast<size_t>(branch.sequence_idx)];
    const Share other{.scheduled = &scheduled,
                      .drafts = drafts_of(scheduled),
                      .row = branch.first_row,
                      .end_row = branch.first_row + branch.token_ids.size() + 1};
    num_all += branch.num_own;
    const int32_t num_right = count_right(other);
    if (num_right <= most) continue;
    most = num_right;
    best = &branch;
    share = other;
  }
  share.num_others = num_all - static_cast<int32_t>(share.drafts.size());
  if (best != nullptr) sequence.table.blocks.swap(best->table.blocks);
  book_.drop_branches(sequence);
  return share;
}

// What this commit and the schedule() after it touch of the sequences that were in the step.
void StepCommitter::prefetch_books(const StepFlight& flight) const {
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
  outbox_.prefetch(num_events, flight.sequences.size());
  for (const Sequence* sequence : flight.sequences) kv_cache_.prefetch_newest(sequence->table);
}

void StepCommitter::commit(Sequence& sequence, Share share) {
  const int32_t num_drafted = std::exchange(sequence.num_drafted, 0);
  const int32_t num_awaited_masks = count_awaited_masks(sequence, share);
  cache_blocks(sequence, share.scheduled->num_known() - (num_awaited_masks > 0 ? 1 : 0));
  if (sequence.is_abort_requested) {
    if (num_drafted > 0 || num_awaited_masks > 0) drop_rejected(sequence);
    return;
  }
  if (share.row < share.end_row && plan_->logit_rows[share.end_row - 1].is_awaitable)
    --sequence.num_awaited;
  for (; share.row < share.end_row && plan_->logit_rows[share.row].given_token_id >= 0;
       ++share.row) {
    if (!score_prompt_token(sequence, sampled_->rows[share.row])) return;
  }
  if (!sequence.is_plain && sequence.context->request.pooled) {
    if (sequence.num_to_run() == 0) finish_pooled(sequence);
    return;
  }
  if (share.row == share.end_row) return;
  if (num_awaited_masks > 0) {
    sequence.num_awaited_masks += num_awaited_masks;
    return drop_rejected(sequence);
  }
  if (!sequence.is_plain && sequence.context->request.beam_search) {
    const SampledToken& token = sampled_->rows[share.row];
    return beams_.hold(sequence,
                       token.is_valid ? sampled_->top(token) : std::span<const TokenLogprob>());
  }
  // Before the first token's event, which tells it.
  sequence.num_draft_tokens += std::ssize(share.drafts) + share.num_others;
  append_samples(sequence, share.row);
  if (num_drafted > 0) accept_drafts(sequence, share);
}

// One a sample: rows after drafted tokens wait for one mask with the first. Where one of several
// samples awaits its mask, all are drawn in a later step.
int32_t StepCommitter::count_awaited_masks(const Sequence& sequence, const Share& share) const {
  int32_t count = 0;
  for (size_t row = share.row; row < share.end_row; ++row)
    if (sampled_->rows[row].awaits_mask) ++count;
  return sequence.num_samples > 1 ? count : std::min(count, 1);
}

// Tokens [0, num_computed) are in the KV pool, and the sequence's own.
void StepCommitter::cache_blocks(Sequence& sequence, int64_t num_computed) {
  sequence.num_computed = num_computed;
  kv_cache_.commit(sequence.table, sequence.token_ids, num_computed);
  if (sequence.table.keeps_one_more) book_.send_computed(sequence);
}

// False: that was the sequence's end.
bool StepCommitter::score_prompt_token(Sequence& sequence, const SampledToken& token) {
  RequestContext& context = *sequence.context;
  if (!token.is_valid) {
    book_.finish(sequence, FinishReason::kError, not_finite_error(context.num_scored + 1));
    return false;
  }
  const auto top = sampled_->top(token);
  context.prompt_logprobs.push_back({token.token_id, token.logprob, token.rank});
  context.prompt_top_logprobs.emplace_back(top.begin(), top.end());
  ++context.num_scored;
  return true;
}

void StepCommitter::finish_pooled(Sequence& sequence) {
  const std::shared_ptr<PooledOutput>& pooled = sequence.context->request.pooled;
  if (!pooled->is_finite) {
    return book_.finish(sequence, FinishReason::kError, not_finite_error(sequence.num_tokens()));
  }
  sequence.times.first_token_us = sequence.times.last_token_us = now_us_;
  TokenEvent& event = outbox_.add_event(sequence);
  event.pooled = pooled;
  event.finish_reason = FinishReason::kStop;
  book_.retire(sequence, event);
}

// All forks before any token: they share the prompt as it is now.
void StepCommitter::append_samples(Sequence& sequence, size_t row) {
  const size_t first_fork = book_.forks().size();
  const int32_t num_samples = std::exchange(sequence.num_samples, 1);
  for (int32_t i = 1; i < num_samples; ++i) book_.fork(sequence, i);
  append_token(sequence, sampled_->rows[row]);
  for (int32_t i = 1; i < num_samples; ++i) {
    append_token(*book_.forks()[first_fork + static_cast<size_t>(i) - 1],
                 sampled_->rows[row + static_cast<size_t>(i)]);
  }
}

// A drafted token is accepted if it is the token that was drawn in its place: then what was drawn
// after it is the sequence's next token, just as if it had run by itself. The blocks of those that
// are not accepted go back.
void StepCommitter::accept_drafts(Sequence& sequence, const Share& share) {
  int32_t num_accepted = 0;
  for (size_t i = 0; i < share.drafts.size(); ++i) {
    if (sequence.is_ended() || share.drafts[i] != sequence.token_ids.back()) break;
    ++num_accepted;
    ++sequence.num_accepted_tokens;
    cache_blocks(sequence, sequence.num_tokens());
    append_token(sequence, sampled_->rows[share.row + 1 + i]);
  }
  outbox_.add_drafts({.request_id = sequence.request_id,
                      .sample_index = sequence.sample_index,
                      .num_drafted = static_cast<int32_t>(share.drafts.size()),
                      .num_others = share.num_others,
                      .num_accepted = num_accepted,
                      .is_cut = sequence.is_ended()});
  ++num_drafts_;
  num_draft_tokens_ += std::ssize(share.drafts) + share.num_others;
  num_accepted_tokens_ += num_accepted;
  for (int32_t i = 0; i < num_accepted; ++i) ++num_accepted_per_pos_[static_cast<size_t>(i)];
  if (!sequence.is_ended()) drop_rejected(sequence);
}

// What it has in the KV pool beyond what was committed counts for nothing: guesses, or a last token
// that runs again.
void StepCommitter::drop_rejected(Sequence& sequence) {
  sequence.num_scheduled = sequence.num_computed;
  kv_cache_.truncate(sequence.table, sequence.num_computed);
}

void StepCommitter::fill_metrics(EngineMetrics& metrics) const {
  metrics.num_generation_tokens = num_generation_tokens_;
  metrics.num_drafts = num_drafts_;
  metrics.num_draft_tokens = num_draft_tokens_;
  metrics.num_accepted_tokens = num_accepted_tokens_;
  metrics.num_accepted_per_pos = num_accepted_per_pos_;
}

void StepCommitter::append_token(Sequence& sequence, const SampledToken& token) {
  if (!token.is_valid) {
    if (token.error_idx >= 0)
      book_.finish(sequence, FinishReason::kInvalid,
                   sampled_->errors[static_cast<size_t>(token.error_idx)]);
    else
      book_.finish(sequence, FinishReason::kError, not_finite_error(sequence.num_tokens()));
    return;
  }
  const bool is_first = sequence.num_generated() == sequence.num_resumed;
  const int64_t previous_us = is_first ? 0 : sequence.times.last_token_us;
  sequence.token_ids.push_back(token.token_id);
  sequence.times.last_token_us = now_us_;
  if (is_first) sequence.times.first_token_us = now_us_;
  ++num_generation_tokens_;
  outbox_.add_progress({.request_id = sequence.request_id,
                        .sample_index = sequence.sample_index,
                        .num_preemptions = sequence.num_preemptions,
                        .num_cached_tokens = sequence.num_cached_tokens,
                        .previous_us = previous_us,
                        .times = sequence.times});
  policy_.on_tokens(sequence.context->request, 1);
  TokenEvent& news = outbox_.news_of(sequence);
  if (sequence.is_streamed) news.token_ids.push_back(token.token_id);
  if (!sequence.is_plain) report_logprobs(sequence, token, news);
  const FinishReason reason = check_end(sequence, token.is_end, news);
  if (reason == FinishReason::kNone) return;
  TokenEvent& last = outbox_.last_event(sequence, news);
  last.finish_reason = reason;
  book_.retire(sequence, last);
}

void StepCommitter::report_logprobs(Sequence& sequence, const SampledToken& token,
                                    TokenEvent& news) const {
  if (sequence.sample_index == 0 && sequence.num_generated() == 1) {
    news.prompt_logprobs = std::move(sequence.context->prompt_logprobs);
    news.prompt_top_logprobs = std::move(sequence.context->prompt_top_logprobs);
  }
  if (!sequence.params().has_logprobs()) return;
  const auto top = sampled_->top(token);
  news.logprobs.push_back({token.token_id, token.logprob, token.rank});
  news.top_logprobs.emplace_back(top.begin(), top.end());
}

FinishReason StepCommitter::check_end(Sequence& sequence, bool is_end, TokenEvent& event) const {
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
