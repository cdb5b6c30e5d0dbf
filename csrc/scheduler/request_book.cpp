#include "scheduler/request_book.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "scheduler/admission.h"

namespace llmserve {
namespace {

// What a beam asks of the sampler: its candidates.
SamplingParams beam_sampling_params(const Request& request) {
  return {.draw = {.temperature = 0},
          .ignore_eos = request.params.ignore_eos,
          .max_tokens = request.params.max_tokens,
          .logprobs = request.beam_search->num_candidates(),
          .detokenize = false};
}

// What, beside its tokens, decides what the request's blocks hold.
TokenHash prefix_root(const Request& request) {
  if (!request.adapter) return root_hash(request.cache_salt);
  return root_hash(request.cache_salt, {&request.adapter->digest, 1});
}

}  // namespace

std::string not_finite_error(int64_t position) {
  return concat("the logits of position ", position,
                " are not finite: the model's weights or its dtype do not carry this prompt; "
                "check the checkpoint or try dtype='float32'");
}

void RequestBook::add(Request request) {
  if (requests_.contains(request.id)) {
    throw InvalidArgument(concat("request id ", request.id, " is in use"));
  }
  if (config_.max_num_queued_reqs > 0 && waiting_.num_newcomers() >= config_.max_num_queued_reqs) {
    throw ResourceExhausted(concat(
        "the queue is full: ", waiting_.num_newcomers(),
        " requests wait and max_num_queued_reqs=", config_.max_num_queued_reqs, "; retry later"));
  }
  RequestEntry& entry = requests_[request.id];
  RequestContext& context = entry.context;
  if (request.beam_search) request.params = beam_sampling_params(request);
  context.service_key = policy_.service_key(request);
  context.order = next_order_++;
  context.stop_token_ids = stop_token_ids(config_, request.params);
  context.stop_strings = StopStrings(request.params.stop);
  context.num_unfinished = request.params.n;
  context.request = std::move(request);
  entry.sequences.push_back(make_sequence(context, 0));
  Sequence& sequence = *entry.sequences.back();
  sequence.num_samples = context.request.params.n;
  sequence.token_ids = context.request.prompt_token_ids;
  sequence.times.arrival_us = context.request.arrival_us;
  resume(sequence);
  waiting_.insert(sequence);
}

LeavingRequest RequestBook::leave(RequestId id) {
  for (const auto& sequence : requests_.at(id).sequences) {
    if (sequence->state == SequenceState::kLoading) {
      finish_load(*sequence, false);
    } else if (row(sequence->state).has_seat) {
      preempt(*sequence);
    }
    waiting_.erase(*sequence);
  }
  return requests_.extract(id);
}

void RequestBook::enter(LeavingRequest request) {
  RequestContext& context = request.mapped().context;
  check_internal(!requests_.contains(request.key()), "a request is in one book");
  context.service_key = policy_.service_key(context.request);
  context.order = next_order_++;
  for (const auto& sequence : request.mapped().sequences) {
    sequence->num_awaited_masks = 0;
    waiting_.insert(*sequence);
  }
  requests_.insert(std::move(request));
}

std::vector<RequestId> RequestBook::ids() const {
  std::vector<std::pair<int64_t, RequestId>> found;
  for (const auto& [id, entry] : requests_) found.emplace_back(entry.context.order, id);
  std::ranges::sort(found);
  std::vector<RequestId> ids;
  for (const auto& [order, id] : found) ids.push_back(id);
  return ids;
}

std::unique_ptr<Sequence> RequestBook::make_sequence(RequestContext& context,
                                                     int32_t sample_index) const {
  auto sequence = std::make_unique<Sequence>();
  const Request& request = context.request;
  const SamplingParams& params = request.params;
  sequence->context = &context;
  sequence->request_id = request.id;
  sequence->sample_index = sample_index;
  sequence->seed = sample_seed(request.seed, sample_index);
  sequence->table.owner = request.id;
  sequence->table.root = prefix_root(request);
  sequence->table.keeps_one_more = request.send_to.has_value();
  sequence->table.is_private = request.prompt_embeds != nullptr;
  sequence->num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size());
  sequence->adapter = request.adapter ? request.adapter->index : -1;
  sequence->max_tokens = params.max_tokens;
  sequence->min_tokens = params.min_tokens;
  sequence->stop_token_ids = context.stop_token_ids;
  sequence->is_streamed = request.is_streamed || request.pooled || request.beam_search;
  sequence->has_drafter = request.has_drafter && !request.pooled && !request.beam_search;
  sequence->is_plain = !request.pooled && !request.beam_search && !request.prompt_embeds &&
                       !params.has_logprobs() && !params.prompt_logprobs &&
                       !params.repetition_detection;
  if (params.repetition_detection) sequence->repetition.emplace(*params.repetition_detection);
  sequence->makes_text =
      vocabulary_ && params.detokenize && !request.pooled && !request.beam_search;
  if (sequence->makes_text) {
    sequence->text.emplace(
        *vocabulary_, context.stop_strings,
        StopChecker::Options{.skip_special_tokens = params.skip_special_tokens,
                             .spaces_between_special_tokens = params.spaces_between_special_tokens,
                             .include_stop_str_in_output = params.include_stop_str_in_output});
  }
  return sequence;
}

// The tokens that were generated and given out elsewhere, with their text.
void RequestBook::resume(Sequence& sequence) const {
  const std::vector<int32_t>& resumed = sequence.context->request.resumed_token_ids;
  sequence.num_resumed = static_cast<int32_t>(resumed.size());
  std::string given_out;
  for (const int32_t token_id : resumed) {
    sequence.token_ids.push_back(token_id);
    const bool can_stop = sequence.num_generated() >= sequence.min_tokens;
    if (sequence.makes_text) sequence.text->append(token_id, can_stop, given_out);
    if (sequence.repetition) sequence.repetition->append(sequence.generated());
  }
}

RequestEntry* RequestBook::find(RequestId id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : &found->second;
}

Sequence* RequestBook::find(RequestId id, int32_t sample_index) {
  RequestEntry* entry = find(id);
  if (entry == nullptr) return nullptr;
  const auto found = std::ranges::find_if(entry->sequences, [&](const auto& sequence) {
    return sequence->sample_index == sample_index && !sequence->is_ended();
  });
  return found == entry->sequences.end() ? nullptr : found->get();
}

void RequestBook::reorder() {
  if (!policy_.keys_change()) return;
  waiting_.reorder([this] {
    for (auto& [id, entry] : requests_)
      entry.context.service_key = policy_.service_key(entry.context.request);
  });
  running_.reorder();
}

void RequestBook::move_on(Sequence& sequence, SequenceEvent event) {
  const std::optional<SequenceState> next = next_state(sequence.state, event);
  check_internal(next.has_value(), "a sequence moves as the table of its states says");
  ++num_transitions_[static_cast<size_t>(sequence.state)][static_cast<size_t>(event)];
  sequence.state = *next;
}

void RequestBook::start(Sequence& sequence, SequenceEvent event, int64_t num_hit_tokens) {
  waiting_.erase(sequence);
  move_on(sequence, event);
  running_.insert(sequence);
  sequence.num_computed = sequence.num_scheduled = num_hit_tokens;
  if (sequence.was_admitted) return;
  sequence.was_admitted = true;
  sequence.num_cached_tokens = num_hit_tokens;
  num_prompt_tokens_ += sequence.num_prompt_tokens;
  policy_.on_admitted(sequence.context->request);
}

void RequestBook::finish_load(Sequence& sequence, bool is_done) {
  move_on(sequence, is_done ? SequenceEvent::kLoaded : SequenceEvent::kLoadFailed);
  if (is_done) return;
  running_.erase(sequence);
  send_to_queue(sequence);
}

Sequence& RequestBook::fork(Sequence& parent, int32_t sample_index) {
  RequestEntry& entry = requests_.at(parent.request_id);
  entry.sequences.push_back(make_sequence(entry.context, sample_index));
  Sequence& child = *entry.sequences.back();
  child.state = SequenceState::kRunning;
  child.token_ids = parent.token_ids;
  child.was_admitted = true;
  child.num_cached_tokens = parent.num_cached_tokens;
  child.num_prompt_seen = parent.num_prompt_seen;
  child.times = parent.times;
  child.beam = parent.beam;
  if (kv_cache_.has_state_slot(kNoSlot)) {  // or it starts over
    child.num_computed = child.num_scheduled = parent.num_computed;
    kv_cache_.fork(parent.table, child.table);
  }
  forks_.push_back(&child);
  return child;
}

void RequestBook::place_forks() {
  for (Sequence* child : std::exchange(forks_, {})) {
    if (child->is_ended()) continue;
    if (running_.has_seat() && child->num_computed > 0) {
      running_.insert(*child);
    } else {
      move_on(*child, SequenceEvent::kPreempt);
      send_to_queue(*child);
    }
  }
}

void RequestBook::advance(Sequence& sequence) {
  if (sequence.state == SequenceState::kHeld) move_on(sequence, SequenceEvent::kAdvance);
}

void RequestBook::preempt(Sequence& sequence) {
  move_on(sequence, SequenceEvent::kPreempt);
  running_.erase(sequence);
  ++sequence.num_preemptions;
  ++num_preemptions_;
  send_to_queue(sequence);
}

// Its blocks are wanted elsewhere. What it has sent of them would keep them, so that a peer begins
// anew with it.
void RequestBook::send_to_queue(Sequence& sequence) {
  withdraw(sequence);
  kv_cache_.release(sequence.table);
  sequence.num_computed = sequence.num_scheduled = sequence.num_awaited = 0;
  sequence.num_drafted = sequence.num_drafts = 0;
  sequence.drafts.clear();
  drop_branches(sequence);
  waiting_.insert(sequence);
}

void RequestBook::finish(Sequence& sequence, FinishReason reason, const std::string& error) {
  const int32_t num_samples = std::exchange(sequence.num_samples, 1);
  sequence.context->num_unfinished -= num_samples - 1;
  for (int32_t i = num_samples - 1; i >= 0; --i) {
    TokenEvent& event = outbox_.add_event(sequence);
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

void RequestBook::finish(RequestEntry& entry, FinishReason reason, const std::string& error) {
  if (reason == FinishReason::kAbort) ++num_aborted_;
  for (const auto& sequence : entry.sequences) {
    if (sequence->is_ended()) continue;
    if (row(sequence->state).has_seat) running_.erase(*sequence);
    finish(*sequence, reason, error);
  }
}

void RequestBook::retire(Sequence& sequence, TokenEvent& event) {
  sequence.is_to_send =
      sequence.context->request.send_to &&
      (event.finish_reason == FinishReason::kStop || event.finish_reason == FinishReason::kLength);
  drop(sequence);
  event.is_request_finished = --sequence.context->num_unfinished == 0;
  if (event.is_request_finished) count_finished(sequence.context->request);
}

void RequestBook::count_finished(const Request& request) {
  ++num_finished_;
  policy_.on_finished(request);
}

void RequestBook::drop(Sequence& sequence) {
  if (sequence.state == SequenceState::kWaiting) waiting_.erase(sequence);
  move_on(sequence, SequenceEvent::kFinish);
  if (sequence.num_in_flight == 0) let_go(sequence);
}

void RequestBook::leave_flight(Sequence& sequence) {
  if (sequence.is_ended() && sequence.num_in_flight == 0) let_go(sequence);
}

// Nothing refers to an ended sequence any more, and nobody writes to its blocks.
void RequestBook::let_go(Sequence& sequence) {
  if (sequence.is_to_send && sequence.num_computed > 0) {
    kv_cache_.send_rest(sequence.table, sequence.token_ids, sequence.num_computed,
                        *sequence.context->request.send_to);
  } else {
    withdraw(sequence);
  }
  drop_branches(sequence);
  kv_cache_.release(sequence.table);
  ended_.push_back(&sequence);
}

void RequestBook::send_computed(Sequence& sequence) {
  const RequestContext& context = *sequence.context;
  kv_cache_.send_full(sequence.table, sequence.num_computed, sequence.num_prompt_tokens,
                      *context.request.send_to);
}

void RequestBook::withdraw(Sequence& sequence) {
  if (sequence.table.keeps_one_more)
    kv_cache_.withdraw(sequence.table, *sequence.context->request.send_to);
}

void RequestBook::drop_branches(Sequence& sequence) {
  for (DraftBranch& branch : sequence.branches) kv_cache_.release(branch.table);
  sequence.branches.clear();
}

void RequestBook::cancel_sends() {
  for (const auto& [id, entry] : requests_) {
    for (const auto& sequence : entry.sequences) {
      sequence->is_to_send = false;
      withdraw(*sequence);
    }
  }
  kv_cache_.cancel_sends();
}

void RequestBook::drop_ended() {
  for (const Sequence* sequence : ended_) {
    const auto found = requests_.find(sequence->request_id);
    auto& sequences = found->second.sequences;
    std::erase_if(sequences, [&](const auto& other) { return other.get() == sequence; });
    if (sequences.empty()) requests_.erase(found);
  }
  ended_.clear();
}

void RequestBook::fail(const std::string& reason) {
  forks_.clear();  // of a commit that was cut off; their requests own them
  for (auto& [id, entry] : requests_) finish(entry, FinishReason::kError, reason);
  running_.clear();
  drop_ended();
}

void RequestBook::reset_prefix_cache() {
  std::vector<BlockTable*> tables;
  const auto add = [&](BlockTable& table) {
    if (table.num_blocks() > 0) tables.push_back(&table);
  };
  for (const auto& [id, entry] : requests_) {
    for (const auto& sequence : entry.sequences) {
      add(sequence->table);
      for (DraftBranch& branch : sequence->branches) add(branch.table);
    }
  }
  kv_cache_.reset_prefix_cache(tables);
}

void RequestBook::fill_metrics(EngineMetrics& metrics) const {
  metrics.num_requests_running = running_.size();
  metrics.num_requests_waiting = waiting_.size();
  metrics.num_requests_finished = num_finished_;
  metrics.num_requests_aborted = num_aborted_;
  metrics.num_preemptions = num_preemptions_;
  metrics.num_seats = running_.num_seats();
  metrics.num_prompt_tokens = num_prompt_tokens_;
}

std::vector<const Sequence*> RequestBook::sequences() const {
  std::vector<const Sequence*> all(running_.begin(), running_.end());
  all.insert(all.end(), waiting_.begin(), waiting_.end());
  return all;
}

std::vector<const Sequence*> RequestBook::ended() const {
  std::vector<const Sequence*> ended;
  for (const auto& [id, entry] : requests_) {
    for (const auto& sequence : entry.sequences)
      if (sequence->is_ended()) ended.push_back(sequence.get());
  }
  return ended;
}

void RequestBook::check_sequence(const Sequence& sequence) const {
  const int64_t num_seats = std::ranges::count(running_, &sequence);
  const bool is_queued = waiting_.contains(sequence);
  const SequenceStateRow& state = row(sequence.state);
  check_internal(num_seats == (state.has_seat ? 1 : 0),
                 "a sequence has the one seat that goes with its state, or none");
  check_internal(is_queued == state.has_queue_place,
                 "a sequence has the place in the queue that goes with its state");
  check_internal(state.may_have_blocks || sequence.table.num_blocks() == 0,
                 "a sequence holds blocks only in a state that has them");
  if (sequence.is_ended()) {
    check_internal(sequence.num_in_flight > 0,
                   "an ended sequence is kept for a step in flight alone");
    return;
  }
  check_internal(sequence.num_drafts == std::ssize(sequence.drafts), "drafts are counted");
  if (sequence.state == SequenceState::kLoading) {
    check_internal(KvCacheManager::is_moving(sequence.table), "a loading sequence has a transfer");
    return;
  }
  check_internal(0 <= sequence.num_computed && sequence.num_computed <= sequence.num_scheduled &&
                     sequence.num_to_run() >= 0,
                 "computed <= scheduled <= known, awaited and drafted tokens");
  check_internal(sequence.num_in_flight > 0 || sequence.is_abort_requested ||
                     (sequence.num_scheduled == sequence.num_computed &&
                      sequence.num_awaited == 0 && sequence.num_drafted == 0),
                 "what is not in flight has nothing scheduled, awaits nothing and guesses nothing");
  kv_cache_.check_table(sequence.table, sequence.num_computed, sequence.num_scheduled);
}

void RequestBook::check_integrity() const {
  std::vector<const BlockTable*> tables;
  int64_t num_sequences = 0;
  int32_t num_newcomers = 0;
  for (const auto& [id, entry] : requests_) {
    int32_t num_samples = 0;
    for (const auto& sequence : entry.sequences) {
      check_sequence(*sequence);
      tables.push_back(&sequence->table);
      for (const DraftBranch& branch : sequence->branches) {
        tables.push_back(&branch.table);
        check_internal(sequence->num_in_flight > 0 || branch.table.num_blocks() == 0,
                       "a guess has blocks while it is in flight");
      }
      if (sequence->is_ended()) continue;
      ++num_sequences;
      num_samples += sequence->num_samples;
      if (!sequence->was_admitted) ++num_newcomers;
    }
    check_internal(num_samples == entry.context.num_unfinished,
                   "a request knows how many of its samples are unfinished");
  }
  check_internal(num_sequences == running_.size() + waiting_.size(),
                 "each queued sequence belongs to a request");
  check_internal(num_newcomers == waiting_.num_newcomers(), "newcomers are counted");
  check_internal(std::ranges::is_sorted(running_, ServedBefore()),
                 "running sequences are in the order of service");
  kv_cache_.check_integrity(tables);
}

}  // namespace llmserve
