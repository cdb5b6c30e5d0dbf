// Decides what each step runs, and keeps the books: continuous batching over a paged KV pool.
//
//   schedule() -> StepPlan      who runs which tokens in which blocks; takes blocks, may preempt
//   commit(SampledTokens)       the only place that appends tokens, and finishes what runs
//
// A plan is in flight from the one to the other. Up to max_in_flight are, and they are committed in
// order. Everything else may be called at any time on the same thread.
//
// A step is one ragged batch: running sequences in the policy's order, then waiting ones; prefill
// and decode are the same code, a sequence runs num_tokens - num_computed tokens as far as the
// budget goes. Each running sequence with one token left is sure of its token, so that a long
// prompt never stalls the others; and while any decode, a step takes no more than runs in
// max_stall_us, nor more prompts than have to run by now for all to end together
// (min_spread_tokens). Preemption is by recompute: the victim, the last in the policy's order that
// is not in the step yet, gives its blocks back and waits at the front of the queue. Its tokens
// stay, and since a token depends on seed and position alone it goes on as if nothing had happened.
//
// A step ahead: a sequence may be in two steps in flight, the second with the next chunk of its
// prompt or with the token that the first one draws, named by its logit row. Ends by length are
// known beforehand; where commit() finds another end, its row in the second step counts for nothing
// and its blocks are free with that step's commit. Whom a step in flight runs is neither preempted
// nor finished by schedule(); what would need that stands still, and everybody behind it, until it
// is no more.
//
// A request that outgrows the whole KV pool by itself ends with kError, and the arithmetic: the
// pool was configured too small for max_model_len, and a short answer that looks like a long one
// would hide it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "api/request.h"
#include "api/sampled_tokens.h"
#include "core/clock.h"
#include "core/flight_ring.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/policy.h"
#include "scheduler/sequence.h"
#include "scheduler/spread_size.h"
#include "scheduler/step_pace.h"
#include "scheduler/step_plan.h"
#include "text/vocabulary.h"

namespace llmserve {

class Scheduler {
 public:
  static constexpr int32_t kMaxInFlight = 2;

  // `vocabulary` may be null: then no text is made. It and `clock` outlive the scheduler. `hasher`
  // is replaced only by tests. Throws InvalidArgument for a config that does not validate().
  Scheduler(const SchedulerConfig& config, const CacheConfig& cache, const Vocabulary* vocabulary,
            const Clock& clock, KvCacheManager::Hasher hasher = &chain_hash,
            int32_t max_in_flight = 1);

  // Throws unless the request can run at all: InvalidArgument for an empty prompt, one that leaves
  // no room within max_model_len or a bad parameter; ResourceExhausted if the KV pool is smaller
  // than the prompt and one token. Reads only what never changes, so that any thread may ask.
  void check_request(const Request& request) const;
  // Queues a request that passes check_request(). Throws InvalidArgument if its id is in use and
  // ResourceExhausted if the queue is full. Nothing changed then.
  void add(Request request);
  // Ends all sequences of a request and frees their blocks; one kAbort event each. Those that steps
  // in flight run end with the last one's commit. An id that is not there has finished: nothing
  // happens.
  void abort(RequestId id);
  // Instead of commit(), where a step in flight could not be executed: ends the requests of all
  // steps in flight, with all their sequences, with kError and this reason, or as they were aborted
  // meanwhile. What the steps wrote lies in blocks of theirs alone, none of which is in the prefix
  // cache; everybody else goes on, in smaller batches for a while: what failed may have been their
  // size. No step is in flight then.
  void fail_step(const std::string& reason);
  // Ends every request with kError and this reason, and empties the prefix cache: the books are not
  // to be trusted any more, or the device is not.
  void fail(const std::string& reason);

  // The next step; empty when nothing can run, or nothing before a commit. Valid until its own.
  const StepPlan& schedule();
  // The last plan's decisions, which nothing here reads, in exchange for these, whose memory is a
  // later plan's.
  void take_decisions(std::vector<Decision>& decisions) { next_->plan.decisions.swap(decisions); }
  int32_t max_in_flight() const { return max_in_flight_; }
  int32_t num_in_flight() const { return flights_.size(); }
  // Of the oldest plan in flight: one row for each of its logit rows, in order. A row that is not
  // valid ends its request's sequence with kError. The result holds all events since the last one,
  // and is valid until the next schedule() or commit().
  StepResult& commit(const SampledTokens& sampled);
  // The result has been read: the memory of its events' tokens goes to the next ones. Better at
  // once than at the next commit, when a forward has driven it from the caches.
  void recycle(StepResult& result);
  // What abort(), fail_step() and fail() have brought and no commit has given out.
  StepResult take_result();

  bool has_unfinished() const { return !requests_.empty(); }
  // After an empty plan, the only one in flight: when the next one may not be, on the clock, though
  // nothing arrives; now or earlier: at once. SchedulingPolicy::kNever: only an arrival or an abort
  // changes anything.
  int64_t wake_us() const { return wake_us_; }

  // Preempts the running sequences of a request, between steps.
  void preempt(RequestId id);
  // What was computed so far is not reused by anybody who comes later.
  void reset_prefix_cache();

  // The scheduler's and the cache's counters; the others are left alone.
  void fill_metrics(EngineMetrics& metrics) const;
  // Throws InternalError unless blocks, sequences and queues agree.
  void check_integrity() const;

  // For tests and tools: all unfinished sequences, running ones first, in the order of service;
  // valid until the next call that is not const.
  std::vector<const Sequence*> sequences() const;
  // Likewise: those that have ended while a step in flight runs them, and still hold their blocks.
  std::vector<const Sequence*> ended_in_flight() const;
  const KvCacheManager& kv_cache() const { return kv_cache_; }

 private:
  using Sequences = std::vector<std::unique_ptr<Sequence>>;
  struct RequestEntry {
    RequestContext context;
    Sequences sequences;  // unfinished, or in a step in flight
  };
  struct Flight {
    StepPlan plan;
    std::vector<Sequence*> sequences;  // [B] of plan.sequences
    int64_t start_us = 0;
  };
  // What set a step's budget: max_num_batched_tokens, max_stall_us or min_spread_tokens.
  enum class Bound : uint8_t { kStep, kPace, kSpread };
  struct BoundKinds {
    DecisionKind chunked;
    DecisionKind waits;
  };
  // What is left of a step's budget.
  struct Budget {
    int64_t num_tokens = 0;
    int64_t num_decodes = 0;  // running sequences with one token left that are not in the step yet
    Bound bound = Bound::kStep;
  };

  // scheduler.cpp
  std::unique_ptr<Sequence> make_sequence(RequestContext& context, int32_t sample_index) const;
  void check_can_go_on(const SamplingParams& params) const;
  std::string pool_arithmetic(int64_t num_tokens) const;
  void check_sequence(const Sequence& sequence) const;

  // scheduler_plan.cpp
  enum class Admission : uint8_t { kAdmitted, kSkipped, kStop };
  enum class Room : uint8_t { kMade, kLeft, kWaits };
  void begin_step();
  Budget step_budget() const;
  int64_t spread_tokens(int64_t num_decodes) const;
  void schedule_running(Budget& budget);
  bool waits_for_step(const Sequence& sequence) const;
  Room make_room(Sequence& sequence, int64_t num_new_tokens, Budget& budget);
  void admit_waiting(Budget& budget);
  Admission try_admit(Sequence& sequence, Budget& budget);
  void enter(Sequence& sequence, int64_t num_hit_tokens);
  void count_prefill(Sequence& sequence, int64_t num_new_tokens);
  void put_in_plan(Sequence& sequence, int64_t num_new_tokens, Budget& budget);
  bool reads_prefix_cache(const Sequence& sequence) const;
  void let_go_of_held();
  void add_prompt_rows(const Sequence& sequence);
  void add_logit_rows(Sequence& sequence, int32_t token_offset);
  bool is_awaitable(const Sequence& sequence) const;
  bool outgrows_pool(const Sequence& sequence) const;
  void finish_outgrown(Sequence& sequence);
  std::string outgrown_error(int64_t num_tokens) const;
  QueueState queue_state() const;
  void decide(const Sequence& sequence, DecisionKind kind, int64_t detail);
  static BoundKinds kinds_of(Bound bound);
  void decide_out_of_budget(const Sequence& sequence, const Budget& budget);

  // scheduler_commit.cpp
  void prefetch_books(const Flight& flight) const;
  void count_step(const Flight& flight);
  void give_back_seats();
  void commit_sequence(Sequence& sequence, const SampledTokens& sampled, size_t row,
                       size_t end_row);
  bool score_prompt_token(Sequence& sequence, const SampledTokens& sampled,
                          const SampledToken& token);
  void fork(Sequence& sequence, int32_t sample_index);
  void place_forks();
  void finish_pooled(Sequence& sequence);
  void append_token(Sequence& sequence, const SampledTokens& sampled, const SampledToken& token);
  TokenEvent& news_of(Sequence& sequence);
  void note_progress(const Sequence& sequence, int64_t previous_us);
  static void report_logprobs(Sequence& sequence, const SampledTokens& sampled,
                              const SampledToken& token, TokenEvent& news);
  FinishReason check_end(Sequence& sequence, bool is_end, TokenEvent& event) const;

  // scheduler_beams.cpp
  void hold_candidates(Sequence& sequence, std::span<const TokenLogprob> candidates);
  void advance_beams(RequestEntry& entry);
  void replace_beams(RequestEntry& entry, const std::vector<BeamExtension>& extensions);
  void finish_beams(RequestEntry& entry, const std::vector<BeamExtension>& extensions);

  // scheduler_exit.cpp
  void preempt(Sequence& sequence);
  void send_to_queue(Sequence& sequence);
  void finish_request(RequestEntry& entry, FinishReason reason, const std::string& error);
  void finish(Sequence& sequence, FinishReason reason, const std::string& error);
  static std::string not_finite_error(int64_t position);
  void retire(Sequence& sequence, TokenEvent& event);
  void drop(Sequence& sequence);
  void let_go(Sequence& sequence);
  void end_flights();
  bool is_in_flight(const RequestEntry& entry) const;
  TokenEvent& add_event(Sequence& sequence);
  void drop_finished();

  const SchedulerConfig config_;
  const Vocabulary* const vocabulary_;
  const Clock& clock_;
  const std::unique_ptr<SchedulingPolicy> policy_;
  KvCacheManager kv_cache_;
  StepPace pace_;
  SpreadSize spread_;
  // Sequences that may run: max_num_seqs or, after a step that failed, half of what it ran, until
  // enough steps have gone well.
  int64_t num_seats_;
  int32_t num_good_steps_ = 0;  // since the number of seats changed

  std::unordered_map<RequestId, RequestEntry> requests_;  // unfinished
  std::vector<Sequence*> running_;                        // in the order of service
  std::set<Sequence*, ServedBefore> waiting_;
  int32_t num_newcomers_ = 0;  // of waiting_
  int64_t next_order_ = 0;

  const int32_t max_in_flight_;
  FlightRing<Flight, kMaxInFlight> flights_;
  Flight* next_ = &flights_.next();  // being scheduled, or the last that was
  Flight* committed_ = nullptr;      // being committed
  int64_t num_steps_ = 0;            // scheduled
  bool stands_still_ = false;        // in this step: somebody needs what a step in flight holds
  bool has_preempted_ = false;       // in this step
  int64_t now_us_ = 0;               // of the commit under way, or the last one
  int64_t wake_us_ = SchedulingPolicy::kNever;
  std::vector<RequestId> aborts_;              // of requests that steps in flight run
  std::vector<Sequence*> forks_;               // of the commit under way
  std::vector<RequestEntry*> complete_beams_;  // likewise: all have their candidates
  std::vector<Sequence*> finished_;            // to be dropped
  std::vector<TokenEvent> events_;             // not given out yet
  std::vector<TokenProgress> progress_;        // of the commit under way
  StepResult result_;
  std::vector<std::vector<int32_t>> spare_token_ids_;  // of events that have been read; empty
  EngineMetrics counters_;
};

}  // namespace llmserve
