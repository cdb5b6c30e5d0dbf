#include "scheduler/scheduler.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

const SchedulerConfig& validated(const SchedulerConfig& config) {
  config.validate();
  return config;
}

template <class... Visits>
struct Overloaded : Visits... {
  using Visits::operator()...;
};
template <class... Visits>
Overloaded(Visits...) -> Overloaded<Visits...>;

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, const CacheConfig& cache,
                     const Vocabulary* vocabulary, const Clock& clock, SchedulerOptions options)
    : config_(validated(config)),
      clock_(clock),
      policy_(options.policy ? std::move(options.policy) : make_policy(config)),
      max_in_flight_(options.max_in_flight),
      runs_ahead_(options.runs_ahead && options.max_in_flight > 1),
      wanted_layers_(std::move(options.wanted_layers)),
      kv_cache_(cache, options.hasher, config.max_num_batched_tokens),
      admission_(config_, kv_cache_, vocabulary, options.limits),
      budget_rule_(config_),
      shares_(runs_ahead_ ? 1 : max_in_flight_),
      book_(config_, vocabulary, *policy_, kv_cache_, outbox_),
      planner_(config_, *policy_, kv_cache_, admission_, book_, budget_rule_, shares_),
      committer_(config_, *policy_, kv_cache_, admission_, book_, outbox_),
      flights_(max_in_flight_),
      newest_(&flights_.next()) {
  check_internal(1 <= max_in_flight_ && max_in_flight_ <= (runs_ahead_ ? kMaxAhead : kMaxInFlight),
                 "no more steps are in flight than can be");
}

void Scheduler::add(Request request) { book_.add(std::move(request)); }

const StepPlan& Scheduler::schedule() {
  check_internal(flights_.size() < max_in_flight_,
                 "a plan is committed before one too many is made");
  newest_ = &flights_.next();
  newest_->plan.clear();
  newest_->sequences.clear();
  newest_->plan.step_id = ++num_steps_;
  newest_->plan.wanted_layers = wanted_layers_;
  newest_->start_us = clock_.now_us();
  kv_cache_.note_step(num_steps_);
  int32_t num_with_decodes = 0;
  for (int32_t i = 0; i < flights_.size(); ++i)
    if (flights_[i].has_decodes) ++num_with_decodes;
  planner_.plan(*newest_, {.num_in_flight = flights_.size(),
                           .num_with_decodes = num_with_decodes,
                           .runs_ahead = runs_ahead_,
                           .max_in_flight = max_in_flight_});
  const auto is_busy = [this](int32_t i) { return !flights_[i].plan.is_empty(); };
  if (!newest_->plan.is_empty() &&
      std::ranges::any_of(std::views::iota(0, flights_.size()), is_busy))
    ++counters_.num_overlapped_steps;
  flights_.launch();
  return newest_->plan;
}

StepResult& Scheduler::commit(const SampledTokens& sampled) {
  check_internal(!flights_.is_empty(), "a commit follows its plan");
  const StepFlight& flight = flights_.oldest();
  check_internal(sampled.rows.size() == flight.plan.logit_rows.size(),
                 "the sampler gives one row for each logit row");
  count_step(flight);
  committer_.commit(flight, sampled, now_us_);
  flights_.retire();
  if (flights_.is_empty()) kv_cache_.give_back_replaced();
  book_.running().erase_ended();
  book_.place_forks();
  take_aborts();
  book_.drop_ended();
  outbox_.take(result_);
  return result_;
}

void Scheduler::count_step(const StepFlight& flight) {
  // Where steps overlap, none counts time that an earlier one has.
  const int64_t start_us = std::max(flight.start_us, std::exchange(now_us_, clock_.now_us()));
  if (flight.plan.is_empty()) return;
  const int64_t elapsed_us = now_us_ - start_us;
  const bool is_prefill = flight.plan.num_prefill_tokens > 0;
  ++(is_prefill ? counters_.num_prefill_steps : counters_.num_decode_steps);
  (is_prefill ? counters_.prefill_us : counters_.decode_us) += elapsed_us;
  count_prefill(flight.plan);
  if (is_prefill) {
    budget_rule_.note_step(flight.plan.num_tokens(), elapsed_us);
  } else {
    shares_.note_step(flight.num_decoding, flight.num_shares, flight.plan.num_tokens(), elapsed_us);
  }
  book_.running().give_seats_back();
}

void Scheduler::count_prefill(const StepPlan& plan) {
  counters_.num_prefill_tokens += plan.num_prefill_tokens;
  counters_.num_recomputed_tokens += plan.num_recomputed_tokens;
}

StepResult Scheduler::take_result() {
  StepResult result;
  outbox_.take(result);
  return result;
}

void Scheduler::take(News news) {
  std::visit(Overloaded{
                 [this](DraftReady& draft) { take(draft); },
                 [this](const TransferDone& done) { finish_transfer(done.id, true); },
                 [this](const TransferFailed& failed) { finish_transfer(failed.id, false); },
                 [this](GrammarReady& grammar) { take(grammar); },
                 [this](const MaskReady& mask) { take(mask); },
                 [this](const RankLost&) { start_over(); },
             },
             news);
}

// Of a sequence that runs, stands still between two steps, and has just the tokens that the drafter
// had seen: else the guess is of another place.
void Scheduler::take(DraftReady& draft) {
  Sequence* sequence = book_.find(draft.request_id, draft.sample_index);
  if (sequence == nullptr || !sequence->has_drafter || sequence->num_samples != 1 ||
      sequence->state != SequenceState::kRunning || sequence->num_in_flight > 0 ||
      sequence->num_tokens() != draft.position)
    return;
  sequence->drafts = std::move(draft.token_ids);
  if (sequence->drafts.size() > kMaxDraftTokens) sequence->drafts.resize(kMaxDraftTokens);
  sequence->num_drafts = static_cast<int32_t>(sequence->drafts.size());
  sequence->branches.clear();  // without blocks: it stands still
  for (std::vector<int32_t>& token_ids : draft.branches) {
    if (token_ids.size() > kMaxDraftTokens) token_ids.resize(kMaxDraftTokens);
    sequence->branches.push_back({.token_ids = std::move(token_ids)});
  }
}

void Scheduler::finish_transfer(TransferId id, bool is_done) {
  const BlockTable* table = kv_cache_.finish_transfer(id, is_done);
  if (table == nullptr) return;
  RequestEntry* entry = book_.find(table->owner);
  check_internal(entry != nullptr, "a table that is loaded belongs to a request");
  for (const auto& sequence : entry->sequences) {
    if (&sequence->table != table) continue;
    book_.finish_load(*sequence, is_done);
    if (is_done) kv_cache_.commit(sequence->table, sequence->token_ids, sequence->num_computed);
  }
}

void Scheduler::take(GrammarReady& grammar) {
  RequestEntry* entry = book_.find(grammar.request_id);
  if (entry == nullptr || !entry->context.request.awaits_grammar) return;
  Request& request = entry->context.request;
  request.awaits_grammar = false;
  request.params.grammar = std::move(grammar.grammar);
  if (request.params.grammar) return;
  book_.finish(*entry, FinishReason::kInvalid, grammar.error);
  book_.drop_ended();
}

// Samples that are not forked yet wait together, as their first.
void Scheduler::take(const MaskReady& mask) {
  Sequence* sequence = book_.find(mask.request_id, mask.sample_index);
  if (sequence == nullptr) sequence = book_.find(mask.request_id, 0);
  if (sequence != nullptr) --sequence->num_awaited_masks;
}

// The KV cache is gone, the tokens are not: everything is computed again.
void Scheduler::start_over() {
  for (int32_t i = 0; i < flights_.size(); ++i)
    count_prefill(flights_[i].plan);  // once, as planned
  book_.cancel_sends();
  end_flights();
  RunningSet& running = book_.running();
  running.erase_ended();
  while (!running.is_empty()) {
    Sequence& sequence = running[running.size() - 1];
    if (sequence.state == SequenceState::kLoading) {
      book_.finish_load(sequence, false);
    } else {
      book_.preempt(sequence);
    }
  }
  take_aborts();
  book_.drop_ended();
  book_.reset_prefix_cache();
}

void Scheduler::abort(RequestId id) {
  RequestEntry* entry = book_.find(id);
  if (entry == nullptr || entry->context.num_unfinished == 0) return;
  if (is_in_flight(*entry)) {
    // Steps in flight write to its blocks, and their plans point into its sequences.
    for (const auto& sequence : entry->sequences) sequence->is_abort_requested = true;
    aborts_.push_back(id);
    return;
  }
  book_.finish(*entry, FinishReason::kAbort, "");
  book_.drop_ended();
}

void Scheduler::take_aborts() {
  for (const RequestId id : std::exchange(aborts_, {})) abort(id);
}

bool Scheduler::is_in_flight(const RequestEntry& entry) const {
  return std::ranges::any_of(entry.sequences,
                             [](const auto& sequence) { return sequence->num_in_flight > 0; });
}

void Scheduler::fail_step(const std::string& reason) {
  for (const RequestId id : end_step()) fail(id, reason);
}

void Scheduler::fail(RequestId id, const std::string& reason) {
  if (RequestEntry* entry = book_.find(id)) book_.finish(*entry, FinishReason::kError, reason);
  book_.drop_ended();
}

std::vector<LeavingRequest> Scheduler::leave_step(const std::string& reason) {
  std::vector<LeavingRequest> left;
  for (const RequestId id : end_step()) {
    RequestEntry* entry = book_.find(id);
    if (entry == nullptr) continue;  // of two steps
    if (std::exchange(entry->has_failed, true)) {
      fail(id, reason);
    } else {
      left.push_back(book_.leave(id));
    }
  }
  return left;
}

std::vector<LeavingRequest> Scheduler::leave(const std::string& reason) {
  std::vector<LeavingRequest> left = leave_step(reason);
  for (const RequestId id : book_.ids()) left.push_back(book_.leave(id));
  return left;
}

std::vector<RequestId> Scheduler::failed_before() {
  std::vector<RequestId> ids;
  for (int32_t i = 0; i < flights_.size(); ++i) {
    for (const ScheduledSequence& sequence : flights_[i].plan.sequences) {
      const RequestEntry* entry = book_.find(sequence.request_id);
      if (entry != nullptr && entry->has_failed) ids.push_back(sequence.request_id);
    }
  }
  return ids;
}

// The requests of the steps in flight, none of which is in flight then.
std::vector<RequestId> Scheduler::end_step() {
  check_internal(!flights_.is_empty(), "a step that fails has a plan");
  std::vector<RequestId> failed;
  int64_t num_sequences = 0;
  for (int32_t i = 0; i < flights_.size(); ++i) {
    const StepPlan& plan = flights_[i].plan;
    num_sequences = std::max<int64_t>(num_sequences, plan.num_sequences());
    for (const ScheduledSequence& sequence : plan.sequences) failed.push_back(sequence.request_id);
  }
  book_.running().take_seats(num_sequences);
  end_flights();
  book_.drop_ended();
  take_aborts();
  return failed;
}

// As if nothing more had been asked for; what has ended goes.
void Scheduler::end_flights() {
  for (int32_t i = 0; i < flights_.size(); ++i) {
    for (Sequence* sequence : flights_[i].sequences) {
      const bool was_in_flight = std::exchange(sequence->num_in_flight, 0) > 0;
      sequence->num_awaited = 0;
      book_.drop_branches(*sequence);
      if (was_in_flight) book_.leave_flight(*sequence);
    }
    flights_[i].sequences.clear();
  }
  flights_.clear();
  kv_cache_.give_back_replaced();
}

void Scheduler::fail(const std::string& reason) {
  book_.cancel_sends();
  end_flights();
  aborts_.clear();
  committer_.clear();
  book_.fail(reason);
  reset_prefix_cache();
}

void Scheduler::preempt(RequestId id) {
  check_internal(flights_.is_empty(), "preemption on request happens between steps");
  RequestEntry* entry = book_.find(id);
  if (entry == nullptr) return;
  for (const auto& sequence : entry->sequences) {
    if (next_state(sequence->state, SequenceEvent::kPreempt)) book_.preempt(*sequence);
  }
}

void Scheduler::fill_metrics(EngineMetrics& metrics) const {
  book_.fill_metrics(metrics);
  metrics.num_prefill_steps = counters_.num_prefill_steps;
  metrics.num_decode_steps = counters_.num_decode_steps;
  metrics.num_overlapped_steps = counters_.num_overlapped_steps;
  metrics.prefill_us = counters_.prefill_us;
  metrics.decode_us = counters_.decode_us;
  metrics.num_prefill_tokens = counters_.num_prefill_tokens;
  metrics.num_recomputed_tokens = counters_.num_recomputed_tokens;
  committer_.fill_metrics(metrics);
  metrics.prefix_cache_queries = kv_cache_.counters().num_queries;
  metrics.prefix_cache_hits = kv_cache_.counters().num_hits;
  metrics.prefix_cache_evictions = kv_cache_.counters().num_evictions;
  metrics.num_blocks_total = kv_cache_.num_blocks();
  metrics.num_blocks_free = kv_cache_.num_free_blocks();
  metrics.num_blocks_cached = kv_cache_.num_cached_blocks();
  metrics.num_blocks_used = kv_cache_.num_used_blocks();
}

void Scheduler::check_integrity() const {
  book_.check_integrity();
  const auto check_flights = [this](const Sequence* sequence) {
    int32_t num_flights = 0;
    for (int32_t i = 0; i < flights_.size(); ++i) {
      const StepFlight& flight = flights_[i];
      const auto with_seats =
          std::span(flight.sequences).first(static_cast<size_t>(flight.plan.num_sequences()));
      num_flights += static_cast<int32_t>(std::ranges::count(with_seats, sequence));
    }
    check_internal(sequence->num_in_flight == num_flights,
                   "a sequence knows how many steps in flight run it");
  };
  std::ranges::for_each(book_.sequences(), check_flights);
  std::ranges::for_each(book_.ended(), check_flights);
}

}  // namespace llmserve
