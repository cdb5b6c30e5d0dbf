#include "scheduler/step_planner.h"

#include <algorithm>

#include "core/error.h"
#include "core/mix.h"

namespace llmserve {

void StepPlanner::plan(StepFlight& flight, const Company& company) {
  flight_ = &flight;
  company_ = company;
  stands_still_ = has_preempted_ = false;
  wake_us_ = SchedulingPolicy::kNever;
  if (book_.running().is_empty()) budget_rule_.begin_batch();
  book_.reorder();
  StepBudget budget = step_budget();
  schedule_running(budget);
  // Who was just preempted would take the blocks back that they gave.
  if (has_preempted_) {
    wake_us_ = flight_->start_us;
  } else if (!stands_still_) {
    admit_waiting(budget);
  }
  schedule_branches(has_preempted_ || stands_still_ ? StepBudget() : budget);
  if (step().is_empty() && company_.num_in_flight == 0) let_go_of_held();
  kv_cache_.take_transfers(step().transfers);
  kv_cache_.take_state_copies(step().state_copies);
  book_.drop_ended();
}

StepBudget StepPlanner::step_budget() {
  int64_t num_decoding = 0;  // that wait for their next token: from this step, or from another
  int64_t num_decodes = 0;
  for (const Sequence* sequence : book_.running()) {
    if (sequence->num_to_run() <= 1) ++num_decoding;
    if (sequence->is_decoding() && !waits_for_step(*sequence)) ++num_decodes;
  }
  const int32_t num_shares = shares_.of(num_decoding);
  flight_->num_decoding = num_decoding;
  flight_->num_shares = num_shares;
  flight_->has_decodes = false;
  // Where fewer steps than before are to have some, those in flight end first.
  const bool is_full = !company_.runs_ahead && company_.num_with_decodes >= num_shares;
  num_decodes_left_ = is_full ? 0 : (num_decoding + num_shares - 1) / num_shares;
  return budget_rule_.next(book_, kv_cache_,
                           {.num_decodes = std::min(num_decodes, num_decodes_left_),
                            .has_decodes = num_decoding > 0,
                            .num_shares = company_.runs_ahead ? 1 : company_.max_in_flight});
}

void StepPlanner::schedule_running(StepBudget& budget) {
  const RunningSet& running = book_.running();
  for (int64_t i = 0; i < running.size() && !stands_still_;) {
    Sequence& sequence = running[i];
    if (cannot_run(sequence)) {
      ++i;
      continue;
    }
    if (sequence.is_decoding() && num_decodes_left_-- == 0) {  // the next step has it
      num_decodes_left_ = 0;
      decide(sequence, DecisionKind::kWaitsForStep, 0);
      ++i;
      continue;
    }
    if (sequence.is_decoding()) {
      budget.leave_decode();
      flight_->has_decodes = true;
    }
    const int64_t num_new_tokens = std::min(sequence.num_to_run(), budget.num_free());
    if (num_new_tokens <= 0) {
      decide(sequence, waits_kind(budget.bound), 0);
      ++i;
      continue;
    }
    const Room room = make_room(sequence, num_new_tokens, i, budget);
    if (room == Room::kLeft) continue;
    if (room == Room::kMade) {
      const int64_t num_drafted = num_drafts_to_run(sequence, budget.num_free() - num_new_tokens);
      put_in_step(sequence, num_new_tokens, num_drafted, budget);
    }
    stands_still_ = room == Room::kWaits;
    ++i;
  }
}

bool StepPlanner::cannot_run(const Sequence& sequence) {
  if (sequence.has_candidates()) {
    decide(sequence, DecisionKind::kWaitsForBeams, 0);
  } else if (sequence.state == SequenceState::kLoading) {
    decide(sequence, DecisionKind::kWaitsForTransfer, 0);
  } else if (sequence.num_awaited_masks > 0) {
    decide(sequence, DecisionKind::kWaitsForGrammar, 0);
  } else if (waits_for_step(sequence)) {
    decide(sequence, DecisionKind::kWaitsForStep, 0);
  } else {
    return false;
  }
  return true;
}

// What it has to run is not known, or its next token could not be drawn, or what a step in flight
// finds decides whether it goes on: the score of a prompt's token may end it, so may an abort,
// whoever outgrows the pool will end, and drafted tokens may be wrong.
bool StepPlanner::waits_for_step(const Sequence& sequence) const {
  if (sequence.is_abort_requested || sequence.state == SequenceState::kLoading) return true;
  if (sequence.num_awaited_masks > 0) return true;
  if (sequence.num_in_flight == 0) return false;
  if (sequence.num_to_run() == 0 || outgrows_pool(sequence)) return true;
  return !sequence.is_plain &&
         (sequence.context->num_to_score() > 0 || sequence.context->request.pooled);
}

// Preempts whom the policy names of those behind the sequence's place, which the loop above has not
// reached yet. kLeft: the sequence itself had to go. kWaits: steps in flight or transfers hold what
// it needs; since nobody behind it is in this step, they will be free to go in the next.
StepPlanner::Room StepPlanner::make_room(Sequence& sequence, int64_t num_new_tokens, int64_t place,
                                         StepBudget& budget) {
  if (outgrows_pool(sequence)) {
    finish_outgrown(sequence);
    return Room::kLeft;
  }
  while (!kv_cache_.can_allocate(sequence.table, sequence.num_scheduled, num_new_tokens)) {
    Sequence& victim = pick_victim(place);
    const bool is_itself = &victim == &sequence;
    if (victim.num_in_flight > 0 || KvCacheManager::is_moving(victim.table) ||
        (is_itself && company_.num_in_flight > 0)) {
      decide(sequence, DecisionKind::kWaitsForBlocks,
             kv_cache_.num_needed(sequence.table, sequence.num_scheduled, num_new_tokens));
      return Room::kWaits;
    }
    if (!is_itself && victim.is_decoding() && !waits_for_step(victim)) budget.leave_decode();
    decide(victim, DecisionKind::kPreempted, victim.table.num_references());
    book_.preempt(victim);
    has_preempted_ = true;
    if (is_itself) return Room::kLeft;
  }
  return Room::kMade;
}

Sequence& StepPlanner::pick_victim(int64_t place) const {
  const RunningSet& running = book_.running();
  const auto key = [&](const Sequence& sequence) {
    return policy_.victim_key({.request = &sequence.context->request,
                               .num_computed = sequence.num_computed,
                               .num_blocks = sequence.table.num_blocks()});
  };
  int64_t best = running.size() - 1;
  int64_t best_key = key(running[best]);
  for (int64_t i = best - 1; i >= place; --i) {
    const int64_t other = key(running[i]);
    if (other <= best_key) continue;
    best = i;
    best_key = other;
  }
  return running[best];
}

// No more than plain steps would come to before they end the sequence: the token that is drawn
// after the last of them is the sequence's, too.
int64_t StepPlanner::max_guesses(const Sequence& sequence) const {
  return std::min<int64_t>(sequence.max_tokens - sequence.num_generated() - 1,
                           config_.max_model_len - sequence.num_tokens() - 1);
}

// None that costs anybody else their token or their blocks.
int64_t StepPlanner::num_drafts_to_run(const Sequence& sequence, int64_t num_free) const {
  if (sequence.num_drafts == 0 || !sequence.is_decoding()) return 0;
  if (sequence.table.state_slot != kNoSlot) return 0;  // a state cannot take tokens back
  const int64_t num_tokens = sequence.num_tokens();
  int64_t count = std::min({int64_t{sequence.num_drafts}, num_free, max_guesses(sequence)});
  const auto fits = [&] {
    return !admission_.outgrows_pool(num_tokens + count) &&
           kv_cache_.can_allocate(sequence.table, sequence.num_scheduled, 1 + count);
  };
  while (count > 0 && !fits()) --count;
  return std::max<int64_t>(count, 0);
}

void StepPlanner::admit_waiting(StepBudget& budget) {
  const WaitingQueue& waiting = book_.waiting();
  if (waiting.is_empty()) return;
  const QueueState queue = queue_state();
  int32_t num_admissible = policy_.num_admissible(queue);
  int32_t num_returning = queue.num_returning;
  for (auto next = waiting.begin(); next != waiting.end();) {
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
  if (step().is_empty()) wake_us_ = policy_.wake_us(queue);
}

StepPlanner::Admission StepPlanner::wait(const Sequence& sequence, DecisionKind kind,
                                         int64_t detail, Admission admission) {
  decide(sequence, kind, detail);
  return admission;
}

// kStop: it does not fit, and those behind must not overtake it. kSkipped: it waits for something
// that those behind have no part in, and holding up the queue would help nobody.
StepPlanner::Admission StepPlanner::try_admit(Sequence& sequence, StepBudget& budget) {
  if (sequence.has_candidates())
    return wait(sequence, DecisionKind::kWaitsForBeams, 0, Admission::kSkipped);
  if (sequence.is_abort_requested)
    return wait(sequence, DecisionKind::kWaitsForStep, 0, Admission::kSkipped);
  if (sequence.context->request.awaits_grammar || sequence.num_awaited_masks > 0)
    return wait(sequence, DecisionKind::kWaitsForGrammar, 0, Admission::kSkipped);
  if (outgrows_pool(sequence)) {
    finish_outgrown(sequence);
    return Admission::kSkipped;
  }
  if (!book_.running().has_seat())
    return wait(sequence, DecisionKind::kWaitsForSeqs, 0, Admission::kStop);
  const PrefixMatch match = reads_prefix_cache(sequence)
                                ? kv_cache_.find_prefix(sequence.table, sequence.token_ids)
                                : kv_cache_.skip_prefix(sequence.table, sequence.token_ids);
  if (is_to_receive(sequence)) return receive(sequence, match);
  if (match.pending)
    return wait(sequence, DecisionKind::kWaitsForPrefix, match.pending->owner, Admission::kSkipped);
  if (match.stored.num_blocks > 0) return load(sequence, match.stored);
  const int64_t num_hit_tokens = int64_t{match.num_blocks} * kv_cache_.block_size();
  const int64_t num_left = sequence.num_tokens() - num_hit_tokens;
  const int64_t num_new_tokens = std::min(num_left, budget.num_tokens);
  if (num_new_tokens == 0 || (!config_.enable_chunked_prefill && num_new_tokens < num_left))
    return wait(sequence, waits_kind(budget.bound), 0, Admission::kStop);
  // All of its known tokens have to fit, not just this chunk: else it would soon be preempted.
  const int64_t reserve = book_.running().is_empty() ? 0 : config_.admission_reserve_tokens;
  const int32_t num_lacking = kv_cache_.num_lacking(match, sequence.num_tokens() + reserve);
  if (num_lacking > 0)
    return wait(sequence, DecisionKind::kWaitsForBlocks, num_lacking, Admission::kStop);
  if (!kv_cache_.has_state_slot(match.state_slot))
    return wait(sequence, DecisionKind::kWaitsForSeqs, 0, Admission::kStop);
  kv_cache_.attach(sequence.table, match, sequence.token_ids);
  enter(sequence, SequenceEvent::kAdmit, num_hit_tokens);
  put_in_step(sequence, num_new_tokens, 0, budget);
  return Admission::kAdmitted;
}

// It takes its seat and all of its blocks, and runs when the transfer has ended.
StepPlanner::Admission StepPlanner::load(Sequence& sequence, const StoredPrefix& prefix) {
  const int32_t num_lacking = kv_cache_.num_lacking(prefix, sequence.num_tokens());
  if (num_lacking > 0)
    return wait(sequence, DecisionKind::kWaitsForBlocks, num_lacking, Admission::kStop);
  if (!kv_cache_.has_state_slot(prefix.state_slot))
    return wait(sequence, DecisionKind::kWaitsForSeqs, 0, Admission::kStop);
  kv_cache_.load(sequence.table, prefix, sequence.token_ids);
  enter(sequence, SequenceEvent::kLoad, int64_t{prefix.num_blocks} * kv_cache_.block_size());
  return wait(sequence, DecisionKind::kWaitsForTransfer, 0, Admission::kAdmitted);
}

bool StepPlanner::is_to_receive(const Sequence& sequence) const {
  return !sequence.has_received && sequence.context->request.receive_from &&
         sequence.num_tokens() > 1;
}

// Likewise, and all of its tokens but the last are there then.
StepPlanner::Admission StepPlanner::receive(Sequence& sequence, const PrefixMatch& match) {
  const PrefixMatch kept = kv_cache_.keep_for(match, sequence.num_tokens() - 1);
  const int32_t num_lacking = kv_cache_.num_lacking(kept, sequence.num_tokens());
  if (num_lacking > 0)
    return wait(sequence, DecisionKind::kWaitsForBlocks, num_lacking, Admission::kStop);
  kv_cache_.receive(sequence.table, kept, sequence.token_ids,
                    *sequence.context->request.receive_from);
  sequence.has_received = true;
  enter(sequence, SequenceEvent::kLoad, sequence.num_tokens() - 1);
  return wait(sequence, DecisionKind::kWaitsForTransfer, 0, Admission::kAdmitted);
}

void StepPlanner::enter(Sequence& sequence, SequenceEvent event, int64_t num_hit_tokens) {
  decide(sequence, DecisionKind::kAdmitted, num_hit_tokens);
  // What a preempted sequence finds again was counted the first time, but what others have computed
  // of its prompt meanwhile was not.
  const int64_t num_hit = std::min(num_hit_tokens, sequence.num_prompt_tokens);
  const int64_t num_new_hits = std::max<int64_t>(0, num_hit - sequence.num_prompt_seen);
  sequence.num_prompt_seen += num_new_hits;
  if (sequence.was_admitted) {
    kv_cache_.count_query(0, num_new_hits);
  } else {
    sequence.times.scheduled_us = flight_->start_us;
    if (reads_prefix_cache(sequence)) kv_cache_.count_query(sequence.num_tokens(), num_hit_tokens);
  }
  book_.start(sequence, event, num_hit_tokens);
}

// num_prompt_tokens = prefix_cache_hits + num_prefill_tokens - num_recomputed_tokens, once all
// prompts have run.
void StepPlanner::count_prefill(Sequence& sequence, int64_t num_new_tokens) {
  const int64_t end = std::min(sequence.num_scheduled, sequence.num_prompt_tokens);
  const int64_t num_first = std::max<int64_t>(0, end - sequence.num_prompt_seen);
  sequence.num_prompt_seen += num_first;
  step().num_prefill_tokens += static_cast<int32_t>(num_new_tokens);
  step().num_recomputed_tokens += static_cast<int32_t>(num_new_tokens - num_first);
}

void StepPlanner::put_in_step(Sequence& sequence, int64_t num_new_tokens, int64_t num_drafted,
                              StepBudget& budget) {
  const int64_t start = sequence.num_scheduled;
  const bool is_awaited = start >= sequence.num_tokens();
  const bool is_prefill = !is_awaited && (!sequence.is_decoding() || sequence.num_generated() == 0);
  const int64_t num_tokens = num_new_tokens + num_drafted;
  if (sequence.table.state_slot != kNoSlot) keep_state(sequence);
  kv_cache_.allocate(sequence.table, start, num_tokens, step().copies);
  ++sequence.num_in_flight;
  sequence.num_drafted = static_cast<int32_t>(num_drafted);
  sequence.num_scheduled = start + num_tokens;
  budget.num_tokens -= num_tokens;
  if (is_prefill) count_prefill(sequence, num_new_tokens);
  flight_->sequences.push_back(&sequence);
  step().sequences.push_back(
      {.request_id = sequence.request_id,
       .sample_index = sequence.sample_index,
       .first_token = static_cast<int32_t>(step().token_ids.size()),
       .num_tokens = static_cast<int32_t>(num_tokens),
       .num_drafted = static_cast<int32_t>(num_drafted),
       .awaited_row = is_awaited ? sequence.awaited_row : -1,
       .start_position = start,
       .block_tables = sequence.table.blocks,
       .state_slot = sequence.table.state_slot,
       .adapter = sequence.adapter,
       .is_prefill = is_prefill,
       .prompt_embeds =
           sequence.is_plain ? nullptr : sequence.context->request.prompt_embeds.get()});
  append_tokens(sequence, start, num_new_tokens, num_drafted);
  decide(sequence, DecisionKind::kScheduled, num_tokens);
  PooledOutput* pooled = nullptr;
  if (!sequence.is_plain) {
    add_prompt_rows(sequence);
    pooled = sequence.context->request.pooled.get();
  }
  if (pooled != nullptr) {
    step().pooled.push_back(
        {.sequence_idx = static_cast<int32_t>(step().sequences.size() - 1), .output = pooled});
  }
  const int64_t num_left = sequence.num_to_run();
  if (num_left > 0) {
    decide(sequence, chunked_kind(budget.bound), num_left);
  } else if (pooled == nullptr) {
    add_logit_rows(sequence, num_drafted);
  }
  if (sequence.num_drafts > 0) {
    sequence.num_drafts = 0;
    sequence.drafts.clear();
  }
}

// Of sequences whose guesses run, with what budget and blocks all others have left.
void StepPlanner::schedule_branches(StepBudget budget) {
  const size_t num_sequences = flight_->sequences.size();
  for (size_t i = 0; i < num_sequences; ++i) {
    Sequence& sequence = *flight_->sequences[i];
    if (sequence.branches.empty()) continue;
    const std::span<const int32_t> drafts =
        step().tokens_of(step().sequences[i]).last(static_cast<size_t>(sequence.num_drafted));
    std::vector<std::vector<int32_t>> paths;
    paths.emplace_back(drafts.begin(), drafts.end());
    auto& branches = sequence.branches;
    for (size_t b = 0; b < branches.size();) {
      DraftBranch& branch = branches[b];
      const int64_t most = std::min(max_guesses(sequence), budget.num_free() - 1);
      if (std::ssize(branch.token_ids) > most)
        branch.token_ids.resize(static_cast<size_t>(std::max<int64_t>(most, 0)));
      size_t num_shared = 0;
      for (const std::vector<int32_t>& path : paths) {
        const auto end = std::ranges::mismatch(path, branch.token_ids).in2;
        num_shared = std::max(num_shared, static_cast<size_t>(end - branch.token_ids.begin()));
      }
      branch.num_own = static_cast<int32_t>(branch.token_ids.size() - num_shared);
      if (sequence.num_drafted == 0 || branch.num_own == 0 || !take_blocks(sequence, branch)) {
        branches.erase(branches.begin() + static_cast<int64_t>(b));
        continue;
      }
      paths.push_back(branch.token_ids);
      put_branch_in_step(sequence, i, branch, budget);
      ++b;
    }
  }
}

// All blocks of the sequence before its newest token, and own ones from there on. False: there are
// not as many.
bool StepPlanner::take_blocks(const Sequence& sequence, DraftBranch& branch) {
  const int64_t start = sequence.num_computed;
  const int64_t num_tokens = 1 + std::ssize(branch.token_ids);
  if (admission_.outgrows_pool(start + num_tokens)) return false;
  kv_cache_.fork(sequence.table, branch.table);
  kv_cache_.truncate(branch.table, start);
  if (!kv_cache_.can_allocate(branch.table, start, num_tokens)) {
    kv_cache_.release(branch.table);
    return false;
  }
  kv_cache_.allocate(branch.table, start, num_tokens, step().copies);
  return true;
}

// Its rows count where more of its guesses are right than of the sequence's own.
void StepPlanner::put_branch_in_step(Sequence& sequence, size_t sequence_idx, DraftBranch& branch,
                                     StepBudget& budget) {
  const auto num_drafted = static_cast<int32_t>(branch.token_ids.size());
  branch.sequence_idx = static_cast<int32_t>(step().sequences.size());
  branch.first_row = step().logit_rows.size();
  ScheduledSequence scheduled = step().sequences[sequence_idx];
  scheduled.first_token = step().num_tokens();
  scheduled.num_tokens = 1 + num_drafted;
  scheduled.num_drafted = num_drafted;
  scheduled.branch_of = static_cast<int32_t>(sequence_idx);
  scheduled.block_tables = branch.table.blocks;
  std::vector<int32_t>& token_ids = step().token_ids;
  token_ids.push_back(sequence.token_ids.back());
  token_ids.insert(token_ids.end(), branch.token_ids.begin(), branch.token_ids.end());
  budget.num_tokens -= scheduled.num_tokens;
  ++step().num_branches;
  step().sequences.push_back(scheduled);
  flight_->sequences.push_back(&sequence);
  for (int32_t i = 0; i <= num_drafted; ++i) {
    LogitRow row = row_of(sequence, sequence.sample_index, sequence.num_tokens() + i);
    row.token_offset = row.num_drafted = i;
    step().logit_rows.push_back(row);
  }
}

// A prompt's state, before this step changes it, where the chunk before has ended with a block:
// later prompts of the same beginning go on from there.
void StepPlanner::keep_state(Sequence& sequence) {
  const int64_t end = sequence.num_scheduled;
  if (0 < end && end <= sequence.num_prompt_tokens && end % kv_cache_.block_size() == 0 &&
      kv_cache_.can_keep_state(sequence.table))
    kv_cache_.keep_state(sequence.table, sequence.token_ids, end);
}

void StepPlanner::append_tokens(const Sequence& sequence, int64_t start, int64_t num_known,
                                int64_t num_drafted) {
  std::vector<int32_t>& token_ids = step().token_ids;
  if (start >= sequence.num_tokens()) {
    token_ids.push_back(kNoTokenId);
    return;
  }
  const auto known = sequence.token_ids.begin() + start;
  token_ids.insert(token_ids.end(), known, known + num_known);
  if (num_drafted == 0) return;
  token_ids.insert(token_ids.end(), sequence.drafts.begin(), sequence.drafts.begin() + num_drafted);
}

// Beams that wait for others may hold the blocks or seats that these need.
void StepPlanner::let_go_of_held() {
  const RunningSet& running = book_.running();
  for (int64_t i = running.size(); i-- > 0;) {
    if (!running[i].has_candidates()) continue;
    decide(running[i], DecisionKind::kPreempted, running[i].table.num_references());
    book_.preempt(running[i]);
    wake_us_ = flight_->start_us;
    return;
  }
}

// What has to be seen of a prompt's tokens is not in the cache, and embeddings have no ids to be
// found by.
bool StepPlanner::reads_prefix_cache(const Sequence& sequence) const {
  const Request& request = sequence.context->request;
  return sequence.context->num_to_score() == 0 && !request.pooled && !request.prompt_embeds &&
         !request.params.skip_reading_prefix_cache;
}

// One row for each token of this step whose successor in the prompt is to be scored. What was
// scored before a preemption is not scored again.
void StepPlanner::add_prompt_rows(const Sequence& sequence) {
  const int64_t num_scored = sequence.context->num_scored;
  const int64_t end =
      std::min(sequence.num_scheduled, num_scored + sequence.context->num_to_score());
  for (int64_t p = std::max(sequence.num_computed, num_scored); p < end; ++p) {
    step().logit_rows.push_back({.sequence_idx = static_cast<int32_t>(step().sequences.size() - 1),
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

// One for each sample, after the sequence's last token; and one after each token that drafted ones
// follow, the drafted ones included.
void StepPlanner::add_logit_rows(Sequence& sequence, int64_t num_drafted) {
  const bool awaits = is_awaitable(sequence);
  if (awaits) {
    ++sequence.num_awaited;
    sequence.awaited_row = static_cast<int32_t>(step().logit_rows.size());
  }
  const int32_t num_tokens = step().sequences.back().num_tokens;
  const int64_t num_rows = std::max<int64_t>(sequence.num_samples, num_drafted + 1);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t num_behind = sequence.num_samples > 1 ? 0 : num_drafted - i;
    const int32_t sample_index =
        sequence.sample_index + static_cast<int32_t>(sequence.num_samples > 1 ? i : 0);
    LogitRow row = row_of(sequence, sample_index, sequence.num_scheduled - num_behind);
    row.token_offset = static_cast<int32_t>(num_tokens - 1 - num_behind);
    row.num_drafted = static_cast<int32_t>(num_drafted - num_behind);
    row.is_awaitable = awaits;
    step().logit_rows.push_back(row);
  }
}

// Of the token at a position, for the step's last sequence.
LogitRow StepPlanner::row_of(const Sequence& sequence, int32_t sample_index,
                             int64_t position) const {
  const bool may_stop = position - sequence.num_prompt_tokens >= sequence.min_tokens;
  return {.sequence_idx = static_cast<int32_t>(flight_->plan.sequences.size() - 1),
          .request_id = sequence.request_id,
          .sample_index = sample_index,
          .seed = sample_index == sequence.sample_index
                      ? sequence.seed
                      : sample_seed(sequence.context->request.seed, sample_index),
          .position = position,
          .params = &sequence.params(),
          .token_ids = sequence.token_ids,
          .num_prompt_tokens = sequence.num_prompt_tokens,
          .banned_token_ids = may_stop ? std::span<const int32_t>() : sequence.stop_token_ids};
}

// Whether the step after this one may run the token that this one draws: one that is not known to
// be the last, and whose successor can be drawn without knowing which it is.
bool StepPlanner::is_awaitable(const Sequence& sequence) const {
  const int64_t num_tokens = sequence.num_scheduled + 1;  // with the one to be drawn
  const int64_t num_generated = num_tokens - sequence.num_prompt_tokens;
  return company_.runs_ahead && !sequence.has_drafter && sequence.num_samples == 1 &&
         num_generated < sequence.max_tokens && num_tokens < config_.max_model_len &&
         !sequence.params().needs_newest_token() && !sequence.context->request.beam_search;
}

bool StepPlanner::outgrows_pool(const Sequence& sequence) const {
  return admission_.outgrows_pool(sequence.num_tokens() + sequence.num_awaited);
}

void StepPlanner::finish_outgrown(Sequence& sequence) {
  book_.finish(sequence, FinishReason::kError, admission_.outgrown_error(sequence.num_tokens()));
  book_.running().erase(sequence);
}

QueueState StepPlanner::queue_state() const {
  const WaitingQueue& waiting = book_.waiting();
  QueueState queue{.now_us = flight_->start_us,
                   .num_running = static_cast<int32_t>(book_.running().size()),
                   .num_returning = waiting.num_returning(),
                   .num_newcomers = waiting.num_newcomers(),
                   .num_requests = book_.num_added()};
  // The first newcomer in the order of service: by key first, so only the oldest of its key.
  if (const Sequence* first = waiting.first_newcomer())
    queue.oldest_arrival_us = first->times.arrival_us;
  return queue;
}

void StepPlanner::decide(const Sequence& sequence, DecisionKind kind, int64_t detail) {
  step().decisions.push_back({.request_id = sequence.request_id,
                              .sample_index = sequence.sample_index,
                              .kind = kind,
                              .detail = detail});
}

}  // namespace llmserve
