// Decides what each step runs, and keeps the books: continuous batching over a paged KV pool.
//
//   schedule() -> StepPlan      who runs which tokens in which blocks (step_planner.h)
//   commit(SampledTokens)       what they change (step_committer.h)
//   take(News)                  what finished beside the steps, between two of them (news.h)
//
// A plan is in flight from schedule() to commit(). Up to max_in_flight are, and they are committed
// in order. Everything else may be called at any time on the same thread.
//
// A step is one ragged batch. Prefill and decode are the same code: a sequence runs the tokens that
// it has and the KV cache lacks, as far as the budget goes (step_budget.h). Preemption is by
// recompute: a victim gives its blocks back and waits. The victim keeps its tokens. Draws depend on
// seed and position alone, so that its later tokens are the same.
//
// A step ahead: a sequence may be in two steps in flight, the second with the next chunk of its
// prompt or with the token that the first one draws. Ends by length are known beforehand. Where
// commit() finds another end, the row in the second step counts for nothing. schedule() never
// preempts or finishes a sequence of a step in flight. It waits for that step, and so does every
// sequence behind.
//
// Steps side by side: where they do not run ahead (SchedulerOptions), a sequence that decodes is in
// one step in flight, and a prompt in as many as there are, each with its next chunk. How many
// sequences that decode a step takes is learned (step_shares.h).
//
// Drafted tokens run behind a sequence's newest one, each with a logit row. commit() takes those
// that equal what was drawn in their place, and the token drawn after them; so drafts change how
// many tokens a step gives, and no token.
//
// A row may await a mask: nothing was drawn from it. commit() takes the sequence's last token back,
// and the sequence waits for MaskReady and runs that token again. So slow masks change when tokens
// come, and no token.
//
// A request that outgrows the whole KV pool by itself ends with kError. The pool was configured too
// small for max_model_len, and a short answer that looks like a long one would hide it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "api/request.h"
#include "api/sampled_tokens.h"
#include "core/clock.h"
#include "core/flight_ring.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/admission.h"
#include "scheduler/flight.h"
#include "scheduler/news.h"
#include "scheduler/outbox.h"
#include "scheduler/policy.h"
#include "scheduler/request_book.h"
#include "scheduler/step_budget.h"
#include "scheduler/step_committer.h"
#include "scheduler/step_plan.h"
#include "scheduler/step_planner.h"
#include "text/vocabulary.h"

namespace llmserve {

struct SchedulerOptions {
  int32_t max_in_flight = 1;
  // Whether a step may run the token that the step before draws: then two are in flight at most. If
  // not, each step decodes a share of the sequences, so that several steps have work.
  bool runs_ahead = true;
  RequestLimits limits;
  std::vector<int32_t> wanted_layers;  // of every plan; StepPlan::wanted_layers
  // Replaced only by tests.
  KvCacheManager::Hasher hasher = &chain_hash;
  std::unique_ptr<SchedulingPolicy> policy;  // null: config.policy's
};

class Scheduler {
 public:
  static constexpr int32_t kMaxInFlight = 4;
  static constexpr int32_t kMaxAhead = 2;  // of steps that run ahead

  // `vocabulary` may be null: then no text is made. It and `clock` outlive the scheduler. Throws
  // InvalidArgument for a config that does not validate().
  Scheduler(const SchedulerConfig& config, const CacheConfig& cache, const Vocabulary* vocabulary,
            const Clock& clock, SchedulerOptions options = {});

  const RequestAdmission& admission() const { return admission_; }
  // Queues a request that admission() has admitted. Throws InvalidArgument if its id is in use and
  // ResourceExhausted if the queue is full. Nothing changed then.
  void add(Request request);
  // Ends all sequences of a request and frees their blocks; one kAbort event each. Those that steps
  // in flight run end with the last one's commit. An id that is not there has finished: nothing
  // happens.
  void abort(RequestId id);
  void take(News news);
  // Instead of commit(), where a step in flight could not be executed: ends the requests of all
  // steps in flight, with all their sequences, with kError and this reason. Requests that were
  // aborted meanwhile end with kAbort. The steps wrote to blocks of these requests alone, and none
  // of the blocks is in the prefix cache. All other requests go on, in smaller batches for a while:
  // the step may have failed for its size. No step is in flight then.
  void fail_step(const std::string& reason);
  // Likewise, where other schedulers may be able to execute what this one could not: gives out the
  // requests of the steps in flight, for enter() of another one. Those that have left one for this
  // reason before end with kError.
  std::vector<LeavingRequest> leave_step(const std::string& reason);
  // Likewise of all requests.
  std::vector<LeavingRequest> leave(const std::string& reason);
  // Queues a request that has left a scheduler of the same configuration.
  void enter(LeavingRequest request) { book_.enter(std::move(request)); }
  // Requests of the steps in flight that have left another scheduler since a step with them could
  // not be executed there.
  std::vector<RequestId> failed_before();
  // Ends a request with kError and this reason. Precondition: no step in flight runs it.
  void fail(RequestId id, const std::string& reason);
  // Ends every request with kError and this reason, and empties the prefix cache: neither the books
  // nor the device can be trusted.
  void fail(const std::string& reason);

  // The next step. Empty when nothing can run, or nothing can run before a commit. Valid until the
  // plan's own commit.
  const StepPlan& schedule();
  // Swaps the last plan's decisions, which the scheduler does not read, with `decisions`. A later
  // plan uses the memory of the latter.
  void take_decisions(std::vector<Decision>& decisions) { newest_->plan.decisions.swap(decisions); }
  int32_t max_in_flight() const { return max_in_flight_; }
  int32_t num_in_flight() const { return flights_.size(); }
  // Commits the oldest plan in flight. `sampled` has one row for each logit row of the plan, in
  // order. A row that is not valid ends its sequence with kError. The result has all events since
  // the last result, and is valid until the next schedule() or commit().
  StepResult& commit(const SampledTokens& sampled);
  // Keeps the memory of a read result for the next events. The caller should do so at once: at the
  // next commit a forward has driven the memory from the caches.
  void recycle(StepResult& result) {
    outbox_.recycle(result, static_cast<size_t>(book_.running().size()));
  }
  // The events of abort(), take(), fail_step() and fail() that no commit has given out.
  StepResult take_result();

  bool has_unfinished() const { return !book_.is_empty(); }
  // The next plan may have work: requests, or transfers that those that have ended have begun.
  bool has_work() const { return has_unfinished() || kv_cache_.has_begun_transfers(); }
  // After an empty plan, the only one in flight: the time on the clock when the next plan may have
  // work though nothing arrives. SchedulingPolicy::kNever: only an arrival, an abort or news change
  // anything.
  int64_t wake_us() const { return planner_.wake_us(); }

  // Preempts the running sequences of a request, between steps.
  void preempt(RequestId id);
  // No later request reuses what was computed so far.
  // Sequences that may run at once, max_num_seqs at most and at first.
  void allow_seats(int64_t num_seats) { book_.running().allow_seats(num_seats); }
  void reset_prefix_cache() { book_.reset_prefix_cache(); }

  // What goes to peers and no plan has: the KV pool is about to lose what it holds.
  void cancel_sends() { book_.cancel_sends(); }

  // KvCacheManager's, between steps.
  void tell_blocks(bool is_on) { kv_cache_.tell_blocks(is_on); }
  std::vector<BlockEvent> take_block_events() { return kv_cache_.take_block_events(); }

  // Sets the scheduler's and the cache's counters; the others are left alone.
  void fill_metrics(EngineMetrics& metrics) const;
  // Throws InternalError unless blocks, sequences and queues agree.
  void check_integrity() const;

  // For tests and tools: all unfinished sequences in the order of service, those with a seat first.
  // Valid until the next call that is not const.
  std::vector<const Sequence*> sequences() const { return book_.sequences(); }
  // Likewise: sequences that have ended while a step in flight runs them. They still hold blocks.
  std::vector<const Sequence*> ended_in_flight() const { return book_.ended(); }
  const KvCacheManager& kv_cache() const { return kv_cache_; }
  const RequestBook& book() const { return book_; }
  const StepCommitter& committer() const { return committer_; }

 private:
  void take(DraftReady& draft);
  void finish_transfer(TransferId id, bool is_done);
  void take(GrammarReady& grammar);
  void take(const MaskReady& mask);
  void start_over();
  void count_step(const StepFlight& flight);
  void count_prefill(const StepPlan& plan);
  bool is_in_flight(const RequestEntry& entry) const;
  void take_aborts();
  std::vector<RequestId> end_step();
  void end_flights();

  const SchedulerConfig config_;
  const Clock& clock_;
  const std::unique_ptr<SchedulingPolicy> policy_;
  const int32_t max_in_flight_;
  const bool runs_ahead_;
  const std::vector<int32_t> wanted_layers_;
  KvCacheManager kv_cache_;
  const RequestAdmission admission_;
  BudgetRule budget_rule_;
  StepShares shares_;
  Outbox outbox_;
  RequestBook book_;
  StepPlanner planner_;
  StepCommitter committer_;

  FlightRing<StepFlight, kMaxInFlight> flights_;
  StepFlight* newest_;             // the last plan, or the one being made
  int64_t num_steps_ = 0;          // scheduled
  int64_t now_us_ = 0;             // of the last commit
  std::vector<RequestId> aborts_;  // of requests that steps in flight run
  StepResult result_;
  EngineMetrics counters_;  // of steps
};

}  // namespace llmserve
