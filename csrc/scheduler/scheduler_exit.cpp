// How sequences leave: preempted for a while, or finished for good.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "scheduler/scheduler.h"

namespace llmserve {

void Scheduler::abort(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end() || found->second.context.num_unfinished == 0) return;
  if (is_in_flight(found->second)) {
    // Steps in flight write to its blocks, and their plans point into its sequences.
    for (const auto& sequence : found->second.sequences) sequence->is_abort_requested = true;
    aborts_.push_back(id);
    return;
  }
  finish_request(found->second, FinishReason::kAbort, "");
  drop_finished();
}

bool Scheduler::is_in_flight(const RequestEntry& entry) const {
  return std::ranges::any_of(entry.sequences,
                             [](const auto& sequence) { return sequence->num_in_flight > 0; });
}

void Scheduler::fail_step(const std::string& reason) {
  check_internal(flights_.size() > 0, "a step that fails has a plan");
  std::vector<RequestId> failed;
  size_t num_sequences = 0;
  for (int32_t i = 0; i < flights_.size(); ++i) {
    num_sequences = std::max(num_sequences, flights_[i].plan.sequences.size());
    for (const ScheduledSequence& sequence : flights_[i].plan.sequences)
      failed.push_back(sequence.request_id);
  }
  num_seats_ = std::max<int64_t>(1, static_cast<int64_t>(num_sequences) / 2);
  num_good_steps_ = 0;
  end_flights();
  drop_finished();
  for (const RequestId id : std::exchange(aborts_, {})) abort(id);
  for (const RequestId id : failed) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;
    finish_request(found->second, FinishReason::kError, reason);
  }
  drop_finished();
}

// As if nothing more had been asked for; what has ended goes.
void Scheduler::end_flights() {
  for (int32_t i = 0; i < flights_.size(); ++i) {
    for (Sequence* sequence : flights_[i].sequences) {
      const bool was_in_flight = std::exchange(sequence->num_in_flight, 0) > 0;
      sequence->num_awaited = 0;
      if (was_in_flight && sequence->is_ended()) let_go(*sequence);
    }
    flights_[i].sequences.clear();
  }
  flights_.clear();
  kv_cache_.give_back_replaced();
}

void Scheduler::fail(const std::string& reason) {
  end_flights();
  aborts_.clear();
  forks_.clear();  // of a commit that was cut off; their requests own them
  complete_beams_.clear();
  for (auto& [id, entry] : requests_) finish_request(entry, FinishReason::kError, reason);
  running_.clear();
  drop_finished();
  reset_prefix_cache();
}

void Scheduler::finish_request(RequestEntry& entry, FinishReason reason, const std::string& error) {
  if (reason == FinishReason::kAbort) ++counters_.num_requests_aborted;
  for (const auto& sequence : entry.sequences) {
    if (sequence->is_ended()) continue;
    if (sequence->state == SequenceState::kRunning) std::erase(running_, sequence.get());
    finish(*sequence, reason, error);
  }
}

void Scheduler::preempt(RequestId id) {
  check_internal(flights_.size() == 0, "preemption on request happens between steps");
  const auto found = requests_.find(id);
  if (found == requests_.end()) return;
  for (const auto& sequence : found->second.sequences) {
    if (sequence->state == SequenceState::kRunning) preempt(*sequence);
  }
}

void Scheduler::preempt(Sequence& sequence) {
  decide(sequence, DecisionKind::kPreempted, sequence.table.num_references());
  std::erase(running_, &sequence);
  ++sequence.num_preemptions;
  ++counters_.num_preemptions;
  has_preempted_ = true;
  send_to_queue(sequence);
}

void Scheduler::send_to_queue(Sequence& sequence) {
  kv_cache_.release(sequence.table);
  sequence.num_computed = sequence.num_scheduled = sequence.num_awaited = 0;
  sequence.state = SequenceState::kWaiting;
  waiting_.insert(&sequence);
}

// One last event for each sample whose tokens would have come from this sequence.
void Scheduler::finish(Sequence& sequence, FinishReason reason, const std::string& error) {
  const int32_t num_samples = std::exchange(sequence.num_samples, 1);
  sequence.context->num_unfinished -= num_samples - 1;
  for (int32_t i = num_samples - 1; i >= 0; --i) {
    TokenEvent& event = add_event(sequence);
    event.finish_reason = reason;
    event.error = error;
    if (i == 0) {
      if (sequence.text) sequence.text->flush(event.text);
      retire(sequence, event);
      return;
    }
    event.sample_index = sequence.sample_index + i;
    event.seed = sample_seed(sequence.context->request.seed, event.sample_index);
  }
}

std::string Scheduler::not_finite_error(int64_t position) {
  return concat("the logits of position ", position,
                " are not finite: the model's weights or its dtype do not carry this prompt; "
                "check the checkpoint or try dtype='float32'");
}

void Scheduler::retire(Sequence& sequence, TokenEvent& event) {
  drop(sequence);
  event.is_request_finished = --sequence.context->num_unfinished == 0;
  if (event.is_request_finished) ++counters_.num_requests_finished;
}

// Without a word: its place in the queue is free, and so are its blocks unless a step in flight
// runs it.
void Scheduler::drop(Sequence& sequence) {
  if (sequence.state == SequenceState::kWaiting) {
    waiting_.erase(&sequence);
    if (!sequence.was_admitted) --num_newcomers_;
  }
  sequence.state = SequenceState::kFinished;
  if (sequence.num_in_flight == 0) let_go(sequence);
}

// Nothing refers to an ended sequence any more.
void Scheduler::let_go(Sequence& sequence) {
  kv_cache_.release(sequence.table);
  finished_.push_back(&sequence);
}

// Made where it stays: one is made for each token that is streamed, and it is large. Of a sequence
// that is not it is the last, and brings what was withheld.
TokenEvent& Scheduler::add_event(Sequence& sequence) {
  TokenEvent& event = events_.emplace_back();
  if (sequence.withheld) event = std::move(*std::exchange(sequence.withheld, nullptr));
  if (!sequence.is_streamed) {
    event.token_ids.assign(sequence.generated().begin(), sequence.generated().end());
  } else if (!spare_token_ids_.empty()) {
    event.token_ids = std::move(spare_token_ids_.back());
    spare_token_ids_.pop_back();
  }
  event.request_id = sequence.request_id;
  event.sample_index = sequence.sample_index;
  event.num_cached_tokens = sequence.num_cached_tokens;
  event.num_preemptions = sequence.num_preemptions;
  event.seed = sequence.seed;
  event.num_generated = sequence.num_generated();
  event.times = sequence.times;
  return event;
}

void Scheduler::drop_finished() {
  for (const Sequence* sequence : finished_) {
    const auto found = requests_.find(sequence->request_id);
    Sequences& sequences = found->second.sequences;
    std::erase_if(sequences, [&](const auto& other) { return other.get() == sequence; });
    if (sequences.empty()) requests_.erase(found);
  }
  finished_.clear();
}

}  // namespace llmserve
