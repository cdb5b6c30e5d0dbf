// The door, the books and the checks. Steps are planned in scheduler_plan.cpp and committed in
// scheduler_commit.cpp; how sequences leave is in scheduler_exit.cpp.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"

namespace llmserve {
namespace {

const SchedulerConfig& validated(const SchedulerConfig& config) {
  config.validate();
  return config;
}

// What a beam asks of the sampler: its candidates.
SamplingParams beam_sampling_params(const Request& request) {
  return {.draw = {.temperature = 0},
          .ignore_eos = request.params.ignore_eos,
          .max_tokens = request.params.max_tokens,
          .logprobs = request.beam_search->num_candidates(),
          .detokenize = false};
}

std::vector<int32_t> stop_token_ids(const SchedulerConfig& config, const SamplingParams& params) {
  std::vector<int32_t> ids = params.stop_token_ids;
  if (!params.ignore_eos) {
    ids.insert(ids.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, const CacheConfig& cache,
                     const Vocabulary* vocabulary, const Clock& clock,
                     KvCacheManager::Hasher hasher, int32_t max_in_flight)
    : config_(validated(config)),
      vocabulary_(vocabulary),
      clock_(clock),
      policy_(make_policy(config)),
      kv_cache_(cache, hasher, config.max_num_batched_tokens),
      pace_(config.max_stall_us),
      spread_(config.min_spread_tokens, config.max_num_batched_tokens),
      num_seats_(config.max_num_seqs),
      max_in_flight_(max_in_flight),
      flights_(max_in_flight) {
  check_internal(1 <= max_in_flight && max_in_flight <= kMaxInFlight,
                 "one or two steps are in flight");
}

void Scheduler::check_request(const Request& request) const {
  request.params.validate();
  if (request.beam_search) request.beam_search->validate();
  if ((request.beam_search || request.pooling) && request.params.n != 1) {
    throw InvalidArgument(
        concat("n must be 1 for beam search and pooling, got ", request.params.n));
  }
  const int64_t num_tokens = static_cast<int64_t>(request.prompt_token_ids.size());
  const int64_t num_new_tokens = request.pooling ? 0 : 1;  // at least
  if (num_tokens == 0) throw InvalidArgument("the prompt is empty; give at least one token");
  if (num_tokens + num_new_tokens > config_.max_model_len) {
    throw InvalidArgument(concat(
        "the prompt has ", num_tokens, " tokens, but max_model_len=", config_.max_model_len,
        " leaves room for ", config_.max_model_len - num_new_tokens,
        num_new_tokens > 0 ? " and one to generate" : "", "; shorten it or raise max_model_len"));
  }
  check_can_go_on(request.params);
  if (!vocabulary_ && !request.params.stop.empty()) {
    throw InvalidArgument("stop strings need a vocabulary, and this engine makes no text");
  }
  if (kv_cache_.num_blocks_for(num_tokens + num_new_tokens) > kv_cache_.num_blocks()) {
    throw ResourceExhausted(concat("the prompt ", pool_arithmetic(num_tokens + num_new_tokens),
                                   "; raise num_blocks or shorten the prompt"));
  }
}

// The end-of-sequence ids are banned before min_tokens, and only the config knows them.
void Scheduler::check_can_go_on(const SamplingParams& params) const {
  if (!params.allowed_token_ids || params.min_tokens == 0) return;
  const std::vector<int32_t> banned = stop_token_ids(config_, params);
  if (std::ranges::all_of(*params.allowed_token_ids,
                          [&](int32_t id) { return std::ranges::binary_search(banned, id); })) {
    throw InvalidArgument(concat("allowed_token_ids holds nothing but tokens that end the text, ",
                                 "which min_tokens=", params.min_tokens,
                                 " rules out; allow others or set min_tokens=0"));
  }
}

void Scheduler::add(Request request) {
  check_request(request);
  if (requests_.contains(request.id)) {
    throw InvalidArgument(concat("request id ", request.id, " is in use"));
  }
  if (config_.max_num_queued_reqs > 0 && num_newcomers_ >= config_.max_num_queued_reqs) {
    throw ResourceExhausted(concat(
        "the queue is full: ", num_newcomers_,
        " requests wait and max_num_queued_reqs=", config_.max_num_queued_reqs, "; retry later"));
  }
  RequestEntry& entry = requests_[request.id];
  RequestContext& context = entry.context;
  if (request.beam_search) request.params = beam_sampling_params(request);
  context.rank = policy_->rank(request);
  context.order = next_order_++;
  context.stop_token_ids = stop_token_ids(config_, request.params);
  context.stop_strings = StopStrings(request.params.stop);
  context.num_unfinished = request.params.n;
  context.request = std::move(request);
  entry.sequences.push_back(make_sequence(context, 0));
  Sequence& sequence = *entry.sequences.back();
  sequence.num_samples = context.request.params.n;
  sequence.token_ids = context.request.prompt_token_ids;
  sequence.table.owner = context.request.id;
  sequence.table.root = root_hash(context.request.cache_salt);
  sequence.table.is_private = context.request.prompt_embeds != nullptr;
  sequence.times.arrival_us = context.request.arrival_us;
  waiting_.insert(&sequence);
  ++num_newcomers_;
}

std::unique_ptr<Sequence> Scheduler::make_sequence(RequestContext& context,
                                                   int32_t sample_index) const {
  auto sequence = std::make_unique<Sequence>();
  const Request& request = context.request;
  const SamplingParams& params = request.params;
  sequence->context = &context;
  sequence->request_id = request.id;
  sequence->sample_index = sample_index;
  sequence->seed = sample_seed(request.seed, sample_index);
  sequence->num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size());
  sequence->max_tokens = params.max_tokens;
  sequence->min_tokens = params.min_tokens;
  sequence->stop_token_ids = context.stop_token_ids;
  sequence->is_streamed = request.is_streamed || request.pooled || request.beam_search;
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

std::string Scheduler::pool_arithmetic(int64_t num_tokens) const {
  return concat("needs ", kv_cache_.num_blocks_for(num_tokens), " blocks (", num_tokens,
                " tokens, block_size=", kv_cache_.block_size(), "), but the KV pool has ",
                kv_cache_.num_blocks(), " (",
                int64_t{kv_cache_.num_blocks()} * kv_cache_.block_size(), " tokens)");
}

StepResult Scheduler::take_result() {
  return {.events = std::exchange(events_, {}), .progress = std::exchange(progress_, {})};
}

void Scheduler::reset_prefix_cache() {
  std::vector<BlockTable*> tables;
  for (const auto& [id, entry] : requests_) {
    for (const auto& sequence : entry.sequences)
      if (sequence->table.num_blocks() > 0) tables.push_back(&sequence->table);
  }
  kv_cache_.reset_prefix_cache(tables);
}

void Scheduler::fill_metrics(EngineMetrics& metrics) const {
  metrics.num_requests_running = static_cast<int64_t>(running_.size());
  metrics.num_requests_waiting = static_cast<int64_t>(waiting_.size());
  metrics.num_requests_finished = counters_.num_requests_finished;
  metrics.num_requests_aborted = counters_.num_requests_aborted;
  metrics.num_preemptions = counters_.num_preemptions;
  metrics.num_seats = num_seats_;
  metrics.num_prefill_steps = counters_.num_prefill_steps;
  metrics.num_decode_steps = counters_.num_decode_steps;
  metrics.prefill_us = counters_.prefill_us;
  metrics.decode_us = counters_.decode_us;
  metrics.num_prompt_tokens = counters_.num_prompt_tokens;
  metrics.num_prefill_tokens = counters_.num_prefill_tokens;
  metrics.num_recomputed_tokens = counters_.num_recomputed_tokens;
  metrics.num_generation_tokens = counters_.num_generation_tokens;
  metrics.prefix_cache_queries = kv_cache_.counters().num_queries;
  metrics.prefix_cache_hits = kv_cache_.counters().num_hits;
  metrics.prefix_cache_evictions = kv_cache_.counters().num_evictions;
  metrics.num_blocks_total = kv_cache_.num_blocks();
  metrics.num_blocks_free = kv_cache_.num_free_blocks();
  metrics.num_blocks_cached = kv_cache_.num_cached_blocks();
  metrics.num_blocks_used = kv_cache_.num_used_blocks();
}

std::vector<const Sequence*> Scheduler::sequences() const {
  std::vector<const Sequence*> all(running_.begin(), running_.end());
  all.insert(all.end(), waiting_.begin(), waiting_.end());
  return all;
}

std::vector<const Sequence*> Scheduler::ended_in_flight() const {
  std::vector<const Sequence*> ended;
  for (const auto& [id, entry] : requests_) {
    for (const auto& sequence : entry.sequences)
      if (sequence->is_ended()) ended.push_back(sequence.get());
  }
  return ended;
}

void Scheduler::check_sequence(const Sequence& sequence) const {
  int32_t num_flights = 0;
  for (int32_t i = 0; i < flights_.size(); ++i)
    num_flights += static_cast<int32_t>(std::ranges::count(flights_[i].sequences, &sequence));
  check_internal(sequence.num_in_flight == num_flights,
                 "a sequence knows how many steps in flight run it");
  if (sequence.is_ended()) {
    check_internal(num_flights > 0, "an ended sequence is kept for a step in flight alone");
    check_internal(std::ranges::count(running_, &sequence) == 0, "an ended sequence does not run");
    return;
  }
  const bool is_running = sequence.state == SequenceState::kRunning;
  const bool is_queued = waiting_.contains(const_cast<Sequence*>(&sequence));
  check_internal(is_running != is_queued, "an unfinished sequence either runs or waits");
  check_internal(is_running == (std::ranges::count(running_, &sequence) == 1),
                 "a running sequence is in the running list, once");
  check_internal(0 <= sequence.num_computed && sequence.num_computed <= sequence.num_scheduled &&
                     sequence.num_scheduled <= sequence.num_tokens() + sequence.num_awaited,
                 "computed <= scheduled <= known and awaited tokens");
  check_internal(num_flights > 0 || sequence.is_abort_requested ||
                     (sequence.num_scheduled == sequence.num_computed && sequence.num_awaited == 0),
                 "what is not in flight has nothing scheduled and awaits nothing");
  kv_cache_.check_table(sequence.table, sequence.num_computed, sequence.num_scheduled);
  check_internal(is_running || sequence.table.num_blocks() == 0,
                 "a waiting sequence holds no block");
}

void Scheduler::check_integrity() const {
  std::vector<const BlockTable*> tables;
  size_t num_sequences = 0;
  int32_t num_newcomers = 0;
  for (const auto& [id, entry] : requests_) {
    int32_t num_samples = 0;
    for (const auto& sequence : entry.sequences) {
      check_sequence(*sequence);
      tables.push_back(&sequence->table);
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
  check_internal(num_newcomers == num_newcomers_, "newcomers are counted");
  check_internal(std::ranges::is_sorted(running_, ServedBefore()),
                 "running sequences are in the order of service");
  kv_cache_.check_integrity(tables);
}

}  // namespace llmserve
