// schedule(): what the next step runs. Running sequences come first, in the order of service, and
// each decoding one is sure of its token. Then waiting sequences are admitted while there is
// budget, a seat and blocks. plan() takes blocks and may preempt. A sequence that does not fit has
// changed nothing.
#pragma once

#include <cstdint>

#include "api/engine_config.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/admission.h"
#include "scheduler/flight.h"
#include "scheduler/policy.h"
#include "scheduler/request_book.h"
#include "scheduler/step_budget.h"
#include "scheduler/step_shares.h"

namespace llmserve {

class StepPlanner {
 public:
  // All outlive the planner.
  StepPlanner(const SchedulerConfig& config, SchedulingPolicy& policy, KvCacheManager& kv_cache,
              const RequestAdmission& admission, RequestBook& book, BudgetRule& budget_rule,
              const StepShares& shares)
      : config_(config),
        policy_(policy),
        kv_cache_(kv_cache),
        admission_(admission),
        book_(book),
        budget_rule_(budget_rule),
        shares_(shares) {}

  struct Company {
    int32_t num_in_flight = 0;     // steps before this one
    int32_t num_with_decodes = 0;  // of them
    bool runs_ahead = false;       // it may run tokens that the last of them draws
    int32_t max_in_flight = 1;     // with this one
  };
  // Fills a flight whose start_us and plan.step_id are set.
  void plan(StepFlight& flight, const Company& company);
  // After an empty plan: when the next one may have work; see Scheduler::wake_us().
  int64_t wake_us() const { return wake_us_; }

 private:
  enum class Admission : uint8_t { kAdmitted, kSkipped, kStop };
  enum class Room : uint8_t { kMade, kLeft, kWaits };

  StepPlan& step() { return flight_->plan; }
  StepBudget step_budget();
  void schedule_running(StepBudget& budget);
  bool waits_for_step(const Sequence& sequence) const;
  bool cannot_run(const Sequence& sequence);
  Room make_room(Sequence& sequence, int64_t num_new_tokens, int64_t place, StepBudget& budget);
  Sequence& pick_victim(int64_t place) const;
  int64_t max_guesses(const Sequence& sequence) const;
  int64_t num_drafts_to_run(const Sequence& sequence, int64_t num_free) const;
  void admit_waiting(StepBudget& budget);
  Admission try_admit(Sequence& sequence, StepBudget& budget);
  Admission wait(const Sequence& sequence, DecisionKind kind, int64_t detail, Admission admission);
  Admission load(Sequence& sequence, const StoredPrefix& prefix);
  bool is_to_receive(const Sequence& sequence) const;
  Admission receive(Sequence& sequence, const PrefixMatch& match);
  void enter(Sequence& sequence, SequenceEvent event, int64_t num_hit_tokens);
  void put_in_step(Sequence& sequence, int64_t num_new_tokens, int64_t num_drafted,
                   StepBudget& budget);
  void schedule_branches(StepBudget budget);
  bool take_blocks(const Sequence& sequence, DraftBranch& branch);
  void put_branch_in_step(Sequence& sequence, size_t sequence_idx, DraftBranch& branch,
                          StepBudget& budget);
  void append_tokens(const Sequence& sequence, int64_t start, int64_t num_known,
                     int64_t num_drafted);
  void keep_state(Sequence& sequence);
  void count_prefill(Sequence& sequence, int64_t num_new_tokens);
  void add_prompt_rows(const Sequence& sequence);
  void add_logit_rows(Sequence& sequence, int64_t num_drafted);
  LogitRow row_of(const Sequence& sequence, int32_t sample_index, int64_t position) const;
  bool is_awaitable(const Sequence& sequence) const;
  bool outgrows_pool(const Sequence& sequence) const;
  void finish_outgrown(Sequence& sequence);
  bool reads_prefix_cache(const Sequence& sequence) const;
  void let_go_of_held();
  QueueState queue_state() const;
  void decide(const Sequence& sequence, DecisionKind kind, int64_t detail);

  const SchedulerConfig& config_;
  SchedulingPolicy& policy_;
  KvCacheManager& kv_cache_;
  const RequestAdmission& admission_;
  RequestBook& book_;
  BudgetRule& budget_rule_;
  const StepShares& shares_;

  // Of the step that is planned.
  StepFlight* flight_ = nullptr;
  Company company_;
  int64_t num_decodes_left_ = 0;  // that the step may take still
  bool stands_still_ = false;     // a sequence needs what a step in flight holds
  bool has_preempted_ = false;
  int64_t wake_us_ = SchedulingPolicy::kNever;
};

}  // namespace llmserve
