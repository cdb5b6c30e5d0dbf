// How sequences leave: preempted for a while, or finished for good.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "scheduler/scheduler.h"

namespace llmserve {

void Scheduler::abort(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return;
  if (is_in_step_) {
    // The step in flight writes to its blocks, and the plan points into its sequences.
    for (const auto& sequence : found->second.sequences) sequence->is_abort_requested = true;
    aborts_.push_back(id);
    return;
  }
  finish_request(found->second, FinishReason::kAbort, "");
  drop_finished();
}

void Scheduler::fail_step(const std::string& reason) {
  check_internal(is_in_step_, "a step that fails has a plan");
  is_in_step_ = false;
  in_flight_.clear();
  for (const RequestId id : std::exchange(aborts_, {})) abort(id);
  for (const ScheduledSequence& sequence : plan_.sequences) {
    const auto found = requests_.find(sequence.request_id);
    if (found == requests_.end()) continue;
    finish_request(found->second, FinishReason::kError, reason);
  }
  drop_finished();
}

void Scheduler::fail(const std::string& reason) {
  is_in_step_ = false;
  in_flight_.clear();
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
    if (sequence->state == SequenceState::kFinished) continue;  // by a commit that was cut off
    if (sequence->state == SequenceState::kRunning) std::erase(running_, sequence.get());
    finish(*sequence, reason, error);
  }
}

void Scheduler::preempt(RequestId id) {
  check_internal(!is_in_step_, "preemption on request happens between steps");
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
  sequence.num_computed = sequence.num_scheduled = 0;
  sequence.state = SequenceState::kWaiting;
  waiting_.insert(&sequence);
}

// One last event for each sample whose tokens would have come from this sequence.
void Scheduler::finish(Sequence& sequence, FinishReason reason, const std::string& error) {
  const int32_t num_samples = std::exchange(sequence.num_samples, 1);
  sequence.context->num_unfinished -= num_samples - 1;
  TokenEvent event = new_event(sequence);
  event.finish_reason = reason;
  event.error = error;
  for (int32_t i = num_samples - 1; i > 0; --i) {
    TokenEvent& other = events_.emplace_back(event);
    other.sample_index = sequence.sample_index + i;
    other.seed = sample_seed(sequence.context->request.seed, other.sample_index);
  }
  if (sequence.text) sequence.text->flush(event.text);
  retire(sequence, event);
  events_.push_back(std::move(event));
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

// Without a word: its blocks and its place in the queue are free.
void Scheduler::drop(Sequence& sequence) {
  if (sequence.state == SequenceState::kWaiting) {
    waiting_.erase(&sequence);
    if (!sequence.was_admitted) --num_newcomers_;
  }
  kv_cache_.release(sequence.table);
  sequence.state = SequenceState::kFinished;
  finished_.push_back(&sequence);
}

TokenEvent Scheduler::new_event(const Sequence& sequence) const {
  TokenEvent event;
  event.request_id = sequence.context->request.id;
  event.sample_index = sequence.sample_index;
  event.num_cached_tokens = sequence.num_cached_tokens;
  event.num_preemptions = sequence.num_preemptions;
  event.seed = sequence.seed;
  event.times = sequence.times;
  return event;
}

void Scheduler::drop_finished() {
  for (const Sequence* sequence : finished_) {
    const auto found = requests_.find(sequence->context->request.id);
    Sequences& sequences = found->second.sequences;
    std::erase_if(sequences, [&](const auto& other) { return other.get() == sequence; });
    if (sequences.empty()) requests_.erase(found);
  }
  finished_.clear();
}

}  // namespace llmserve
