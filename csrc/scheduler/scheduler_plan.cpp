// schedule(): what the next step runs.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/mix.h"
#include "scheduler/scheduler.h"

namespace llmserve {

const StepPlan& Scheduler::schedule() {
  check_internal(flights_.size() < max_in_flight_,
                 "a plan is committed before one too many is made");
  begin_step();
  Budget budget = step_budget();
  schedule_running(budget);
  // Who was just preempted would take the blocks back that they gave.
  if (has_preempted_) {
    wake_us_ = next_->start_us;
  } else if (!stands_still_) {
    admit_waiting(budget);
  }
  if (next_->plan.is_empty() && flights_.size() == 0) let_go_of_held();
  drop_finished();
  flights_.launch();
  return next_->plan;
}

void Scheduler::begin_step() {
  next_ = &flights_.next();
  next_->plan.step_id = ++num_steps_;
  next_->plan.copies.clear();
  next_->plan.sequences.clear();
  next_->plan.logit_rows.clear();
  next_->plan.pooled.clear();
  next_->plan.decisions.clear();
  next_->plan.token_ids.clear();
  next_->plan.num_prefill_tokens = next_->plan.num_recomputed_tokens = 0;
  next_->sequences.clear();
  if (running_.empty()) spread_.begin_batch();
  has_preempted_ = false;
  stands_still_ = false;
  next_->start_us = clock_.now_us();
  wake_us_ = SchedulingPolicy::kNever;
}

Scheduler::Budget Scheduler::step_budget() const {
  Budget budget{.num_tokens = config_.max_num_batched_tokens};
  bool has_waiting = false;  // for their next token: from this step, or from one after it
  for (const Sequence* sequence : running_) {
    has_waiting = has_waiting || sequence->num_to_run() <= 1;
    if (sequence->is_decoding() && !waits_for_step(*sequence)) ++budget.num_decodes;
  }
  if (!has_waiting) return budget;
  const auto bound_by = [&](int64_t num_tokens, Bound bound) {
    if (num_tokens >= budget.num_tokens) return;
    budget.num_tokens = num_tokens;
    budget.bound = bound;
  };
  bound_by(pace_.max_tokens(budget.num_decodes), Bound::kPace);
  bound_by(spread_tokens(budget.num_decodes), Bound::kSpread);
  return budget;
}

// Tokens of this step with which each prompt, in its turn, has run as many steps before the batch
// ends as its request may generate tokens; whoever streams has no time. No bound where more wait
// than there are seats or blocks for: those behind need them.
int64_t Scheduler::spread_tokens(int64_t num_decodes) const {
  constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();
  if (config_.min_spread_tokens == 0) return kNoBound;
  const auto num_to_generate = [](const Sequence& sequence) {
    return sequence.max_tokens - sequence.num_generated();
  };
  int64_t num_samples = 0;
  int64_t num_steps = 0;  // that the batch takes
  const auto count = [&](const Sequence& sequence) {
    num_samples += sequence.num_samples;
    num_steps = std::max(num_steps, num_to_generate(sequence));
    return num_samples <= num_seats_;
  };
  if (!std::ranges::all_of(running_, [&](const Sequence* s) { return count(*s); }) ||
      !std::ranges::all_of(waiting_, [&](const Sequence* s) { return count(*s); }))
    return kNoBound;
  int64_t num_in_turn = 0;
  int64_t num_due = 0;
  const auto take_turn = [&](const Sequence& sequence) {
    if (sequence.num_to_run() <= 1) return;
    num_in_turn += sequence.num_to_run();
    // The step that ends a prompt draws the first token, too.
    const int64_t num_spare_steps =
        sequence.is_streamed ? 1 : num_steps - num_to_generate(sequence) + 1;
    num_due = std::max(num_due, (num_in_turn + num_spare_steps - 1) / num_spare_steps);
  };
  for (const Sequence* sequence : running_) take_turn(*sequence);
  const int64_t num_entered = num_in_turn;
  for (const Sequence* sequence : waiting_) take_turn(*sequence);
  const int64_t num_blocks_left = kv_cache_.num_blocks() - kv_cache_.num_used_blocks();
  if (num_due == 0 || kv_cache_.num_blocks_for(num_in_turn - num_entered) > num_blocks_left)
    return kNoBound;
  return std::max(spread_.num_tokens(), num_decodes + num_due);
}

void Scheduler::schedule_running(Budget& budget) {
  for (size_t i = 0; i < running_.size() && !stands_still_;) {
    Sequence& sequence = *running_[i];
    if (sequence.is_held() || waits_for_step(sequence)) {
      decide(sequence,
             sequence.is_held() ? DecisionKind::kWaitsForBeams : DecisionKind::kWaitsForStep, 0);
      ++i;
      continue;
    }
    if (sequence.is_decoding()) --budget.num_decodes;
    const int64_t num_new_tokens =
        std::min(sequence.num_to_run(), budget.num_tokens - budget.num_decodes);
    if (num_new_tokens <= 0) {
      decide_out_of_budget(sequence, budget);
      ++i;
      continue;
    }
    const Room room = make_room(sequence, num_new_tokens, budget);
    if (room == Room::kLeft) continue;
    if (room == Room::kMade) put_in_plan(sequence, num_new_tokens, budget);
    stands_still_ = room == Room::kWaits;
    ++i;
  }
}

// What it has to run is not known, or what a step in flight finds decides whether it goes on: the
// score of a prompt's token may end it, so may an abort, and whoever outgrows the pool will end.
bool Scheduler::waits_for_step(const Sequence& sequence) const {
  if (sequence.is_abort_requested) return true;
  if (sequence.num_in_flight == 0) return false;
  if (sequence.num_to_run() == 0 || outgrows_pool(sequence)) return true;
  return !sequence.is_plain &&
         (sequence.context->num_to_score() > 0 || sequence.context->request.pooled);
}

// Preempts from the end of running_, which the loop above has not reached yet. kLeft: the sequence
// itself had to go. kWaits: steps in flight hold what it needs; since nobody behind it is in this
// step, they will be free to go in the next.
Scheduler::Room Scheduler::make_room(Sequence& sequence, int64_t num_new_tokens, Budget& budget) {
  if (outgrows_pool(sequence)) {
    finish_outgrown(sequence);
    return Room::kLeft;
  }
  while (!kv_cache_.can_allocate(sequence.table, sequence.num_scheduled, num_new_tokens)) {
    Sequence& victim = *running_.back();
    const bool is_itself = &victim == &sequence;
    if (victim.num_in_flight > 0 || (is_itself && flights_.size() > 0)) {
      decide(sequence, DecisionKind::kWaitsForBlocks,
             kv_cache_.num_needed(sequence.table, sequence.num_scheduled, num_new_tokens));
      return Room::kWaits;
    }
    if (!is_itself && victim.is_decoding()) --budget.num_decodes;
    preempt(victim);
    if (is_itself) return Room::kLeft;
  }
  return Room::kMade;
}

void Scheduler::admit_waiting(Budget& budget) {
  if (waiting_.empty()) return;
  const QueueState queue = queue_state();
  int32_t num_admissible = policy_->num_admissible(queue);
  int32_t num_returning = queue.num_returning;
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    Sequence& sequence = **next++;  // which may leave the queue
    if (sequence.was_admitted) {
      --num_returning;
    } else if (num_admissible == 0) {
      decide(sequence, DecisionKind::kWaitsForBatch, 0);
      if (num_returning == 0) break;
      continue;
    }
    const bool is_newcomer = !sequence.was_admitted;
    const Admission admission = try_admit(sequence, budget);
    if (admission == Admission::kStop) break;
    if (admission == Admission::kAdmitted && is_newcomer) --num_admissible;
  }
  if (next_->plan.is_empty()) wake_us_ = policy_->wake_us(queue);
}

// kStop: it does not fit, and those behind must not overtake it. kSkipped: it waits for another
// request's blocks, and holding up the queue would help nobody.
Scheduler::Admission Scheduler::try_admit(Sequence& sequence, Budget& budget) {
  if (sequence.is_held() || sequence.is_abort_requested) {
    decide(sequence,
           sequence.is_held() ? DecisionKind::kWaitsForBeams : DecisionKind::kWaitsForStep, 0);
    return Admission::kSkipped;
  }
  if (outgrows_pool(sequence)) {
    finish_outgrown(sequence);
    return Admission::kSkipped;
  }
  if (static_cast<int64_t>(running_.size()) >= num_seats_) {
    decide(sequence, DecisionKind::kWaitsForSeqs, 0);
    return Admission::kStop;
  }
  const PrefixMatch match = reads_prefix_cache(sequence)
                                ? kv_cache_.find_prefix(sequence.table, sequence.token_ids)
                                : kv_cache_.skip_prefix(sequence.table, sequence.token_ids);
  if (match.pending) {
    decide(sequence, DecisionKind::kWaitsForPrefix, match.pending->owner);
    return Admission::kSkipped;
  }
  const int64_t num_hit_tokens = int64_t{match.num_blocks} * kv_cache_.block_size();
  const int64_t num_left = sequence.num_tokens() - num_hit_tokens;
  const int64_t num_new_tokens = std::min(num_left, budget.num_tokens);
  if (num_new_tokens == 0 || (!config_.enable_chunked_prefill && num_new_tokens < num_left)) {
    decide_out_of_budget(sequence, budget);
    return Admission::kStop;
  }
  // All of its known tokens have to fit, not just this chunk: else it would soon be preempted.
  const int64_t reserve = running_.empty() ? 0 : config_.admission_reserve_tokens;
  const int32_t num_lacking = kv_cache_.num_lacking(match, sequence.num_tokens() + reserve);
  if (num_lacking > 0) {
    decide(sequence, DecisionKind::kWaitsForBlocks, num_lacking);
    return Admission::kStop;
  }
  kv_cache_.attach(sequence.table, match, sequence.token_ids);
  enter(sequence, num_hit_tokens);
  put_in_plan(sequence, num_new_tokens, budget);
  return Admission::kAdmitted;
}

void Scheduler::enter(Sequence& sequence, int64_t num_hit_tokens) {
  decide(sequence, DecisionKind::kAdmitted, num_hit_tokens);
  waiting_.erase(&sequence);
  running_.insert(std::ranges::upper_bound(running_, &sequence, ServedBefore()), &sequence);
  sequence.state = SequenceState::kRunning;
  sequence.num_computed = sequence.num_scheduled = num_hit_tokens;
  // What a preempted sequence finds again was counted the first time, but what others have computed
  // of its prompt meanwhile was not.
  const int64_t num_hit = std::min(num_hit_tokens, sequence.num_prompt_tokens);
  const int64_t num_new_hits = std::max<int64_t>(0, num_hit - sequence.num_prompt_seen);
  sequence.num_prompt_seen += num_new_hits;
  if (sequence.was_admitted) {
    kv_cache_.count_query(0, num_new_hits);
    return;
  }
  sequence.was_admitted = true;
  sequence.num_cached_tokens = num_hit_tokens;
  sequence.times.scheduled_us = next_->start_us;
  --num_newcomers_;
  policy_->on_admitted();
  if (reads_prefix_cache(sequence)) kv_cache_.count_query(sequence.num_tokens(), num_hit_tokens);
  counters_.num_prompt_tokens += sequence.num_prompt_tokens;
}

// num_prompt_tokens = prefix_cache_hits + num_prefill_tokens - num_recomputed_tokens, once all
// prompts have run.
void Scheduler::count_prefill(Sequence& sequence, int64_t num_new_tokens) {
  const int64_t end = std::min(sequence.num_scheduled, sequence.num_prompt_tokens);
  const int64_t num_first = std::max<int64_t>(0, end - sequence.num_prompt_seen);
  sequence.num_prompt_seen += num_first;
  next_->plan.num_prefill_tokens += static_cast<int32_t>(num_new_tokens);
  next_->plan.num_recomputed_tokens += static_cast<int32_t>(num_new_tokens - num_first);
}

void Scheduler::put_in_plan(Sequence& sequence, int64_t num_new_tokens, Budget& budget) {
  const int64_t start = sequence.num_scheduled;
  const bool is_awaited = start >= sequence.num_tokens();
  const bool is_prefill = !is_awaited && (!sequence.is_decoding() || sequence.num_generated() == 0);
  kv_cache_.allocate(sequence.table, start, num_new_tokens, next_->plan.copies);
  sequence.num_scheduled = start + num_new_tokens;
  ++sequence.num_in_flight;
  budget.num_tokens -= num_new_tokens;
  if (is_prefill) count_prefill(sequence, num_new_tokens);
  next_->sequences.push_back(&sequence);
  std::vector<int32_t>& token_ids = next_->plan.token_ids;
  const auto first_token = static_cast<int32_t>(token_ids.size());
  if (is_awaited) {
    token_ids.push_back(kNoTokenId);
  } else {
    const auto known = std::span<const int32_t>(sequence.token_ids).subspan(start, num_new_tokens);
    token_ids.insert(token_ids.end(), known.begin(), known.end());
  }
  next_->plan.sequences.push_back(
      {.request_id = sequence.request_id,
       .sample_index = sequence.sample_index,
       .first_token = first_token,
       .num_tokens = static_cast<int32_t>(num_new_tokens),
       .awaited_row = is_awaited ? sequence.awaited_row : -1,
       .start_position = start,
       .block_tables = sequence.table.blocks,
       .is_prefill = is_prefill,
       .prompt_embeds =
           sequence.is_plain ? nullptr : sequence.context->request.prompt_embeds.get()});
  decide(sequence, DecisionKind::kScheduled, num_new_tokens);
  PooledOutput* pooled = nullptr;
  if (!sequence.is_plain) {
    add_prompt_rows(sequence);
    pooled = sequence.context->request.pooled.get();
  }
  if (pooled != nullptr) {
    next_->plan.pooled.push_back(
        {.sequence_idx = static_cast<int32_t>(next_->plan.sequences.size() - 1), .output = pooled});
  }
  const int64_t num_left = sequence.num_to_run();
  if (num_left > 0) {
    decide(sequence, kinds_of(budget.bound).chunked, num_left);
  } else if (pooled == nullptr) {
    add_logit_rows(sequence, static_cast<int32_t>(num_new_tokens - 1));
  }
}

// Beams that wait for others may hold the blocks or seats that these need.
void Scheduler::let_go_of_held() {
  const auto held =
      std::ranges::find_if(running_.rbegin(), running_.rend(),
                           [](const Sequence* sequence) { return sequence->is_held(); });
  if (held == running_.rend()) return;
  preempt(**held);
  wake_us_ = next_->start_us;
}

// What has to be seen of a prompt's tokens is not in the cache, and embeddings have no ids to be
// found by.
bool Scheduler::reads_prefix_cache(const Sequence& sequence) const {
  const Request& request = sequence.context->request;
  return sequence.context->num_to_score() == 0 && !request.pooled && !request.prompt_embeds &&
         !request.params.skip_reading_prefix_cache;
}

// One row for each token of this step whose successor in the prompt is to be scored. What was
// scored before a preemption is not scored again.
void Scheduler::add_prompt_rows(const Sequence& sequence) {
  const int64_t num_scored = sequence.context->num_scored;
  const int64_t end =
      std::min(sequence.num_scheduled, num_scored + sequence.context->num_to_score());
  for (int64_t p = std::max(sequence.num_computed, num_scored); p < end; ++p) {
    next_->plan.logit_rows.push_back(
        {.sequence_idx = static_cast<int32_t>(next_->plan.sequences.size() - 1),
         .token_offset = static_cast<int32_t>(p - sequence.num_computed),
         .request_id = sequence.request_id,
         .sample_index = sequence.sample_index,
         .seed = sequence.seed,
         .position = p + 1,
         .given_token_id = sequence.token_ids[p + 1],
         .params = &sequence.params(),
         .banned_token_ids = {}});
  }
}

void Scheduler::add_logit_rows(Sequence& sequence, int32_t token_offset) {
  const int64_t position = sequence.num_scheduled;
  const bool may_stop = position - sequence.num_prompt_tokens >= sequence.min_tokens;
  const bool awaits = is_awaitable(sequence);
  if (awaits) {
    ++sequence.num_awaited;
    sequence.awaited_row = static_cast<int32_t>(next_->plan.logit_rows.size());
  }
  for (int32_t i = 0; i < sequence.num_samples; ++i) {
    const int32_t sample_index = sequence.sample_index + i;
    next_->plan.logit_rows.push_back(
        {.sequence_idx = static_cast<int32_t>(next_->plan.sequences.size() - 1),
         .token_offset = token_offset,
         .request_id = sequence.request_id,
         .sample_index = sample_index,
         .seed = i == 0 ? sequence.seed : sample_seed(sequence.context->request.seed, sample_index),
         .position = position,
         .params = &sequence.params(),
         .token_ids = sequence.token_ids,
         .num_prompt_tokens = sequence.num_prompt_tokens,
         .banned_token_ids = may_stop ? std::span<const int32_t>() : sequence.stop_token_ids,
         .is_awaitable = awaits});
  }
}

// Whether the step after this one may run the token that this one draws: one that is not known to
// be the last, and whose successor can be drawn without knowing which it is.
bool Scheduler::is_awaitable(const Sequence& sequence) const {
  const int64_t num_tokens = sequence.num_scheduled + 1;  // with the one to be drawn
  const int64_t num_generated = num_tokens - sequence.num_prompt_tokens;
  return max_in_flight_ > 1 && sequence.num_samples == 1 && num_generated < sequence.max_tokens &&
         num_tokens < config_.max_model_len && !sequence.params().needs_newest_token() &&
         !sequence.context->request.beam_search;
}

bool Scheduler::outgrows_pool(const Sequence& sequence) const {
  return kv_cache_.num_blocks_for(sequence.num_tokens() + sequence.num_awaited) >
         kv_cache_.num_blocks();
}

void Scheduler::finish_outgrown(Sequence& sequence) {
  finish(sequence, FinishReason::kError, outgrown_error(sequence.num_tokens()));
  std::erase(running_, &sequence);
}

std::string Scheduler::outgrown_error(int64_t num_tokens) const {
  return concat("the sequence ", pool_arithmetic(num_tokens),
                "; raise num_blocks or lower max_tokens");
}

QueueState Scheduler::queue_state() const {
  QueueState queue{.now_us = next_->start_us,
                   .num_running = static_cast<int32_t>(running_.size()),
                   .num_returning = static_cast<int32_t>(waiting_.size()) - num_newcomers_,
                   .num_newcomers = num_newcomers_,
                   .num_requests = next_order_};
  // The first newcomer in the order of service: by rank first, so only the oldest of its rank.
  const auto first = std::ranges::find_if(
      waiting_, [](const Sequence* sequence) { return !sequence->was_admitted; });
  if (first != waiting_.end()) queue.oldest_arrival_us = (*first)->times.arrival_us;
  return queue;
}

void Scheduler::decide(const Sequence& sequence, DecisionKind kind, int64_t detail) {
  next_->plan.decisions.push_back({.request_id = sequence.request_id,
                                   .sample_index = sequence.sample_index,
                                   .kind = kind,
                                   .detail = detail});
}

Scheduler::BoundKinds Scheduler::kinds_of(Bound bound) {
  switch (bound) {
    case Bound::kPace:
      return {DecisionKind::kChunkedForPace, DecisionKind::kWaitsForPace};
    case Bound::kSpread:
      return {DecisionKind::kChunkedToSpread, DecisionKind::kWaitsToSpread};
    case Bound::kStep:
      break;
  }
  return {DecisionKind::kChunked, DecisionKind::kWaitsForBudget};
}

void Scheduler::decide_out_of_budget(const Sequence& sequence, const Budget& budget) {
  decide(sequence, kinds_of(budget.bound).waits, 0);
}

}  // namespace llmserve
