// How many tokens a step may run: max_num_batched_tokens at most. While sequences decode, the bound
// is also what runs in max_stall_us at the rate of the last steps with prompts (step_pace.h). In a
// spread batch it is also the prompt tokens that have to run by now for all requests to end
// together (min_spread_tokens, spread_size.h). Where several steps are to have work at once, each
// takes a part of the prompts that are there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api/engine_config.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/request_book.h"
#include "scheduler/spread_size.h"
#include "scheduler/step_pace.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// What set a step's budget: max_num_batched_tokens, max_stall_us or min_spread_tokens.
enum class BudgetBound : uint8_t { kStep, kPace, kSpread };
// The decision on a sequence that the budget cuts, and on one that it leaves no tokens.
DecisionKind chunked_kind(BudgetBound bound);
DecisionKind waits_kind(BudgetBound bound);

// What is left of a step's budget.
struct StepBudget {
  int64_t num_tokens = 0;
  int64_t num_decodes = 0;  // running sequences with one token left that are not in the step yet
  BudgetBound bound = BudgetBound::kStep;

  // Tokens that the next sequence in the order of service may take: each decoding one behind it is
  // sure of its token.
  int64_t num_free() const { return num_tokens - num_decodes; }
  // One of them is in the step, or will not be.
  void leave_decode() { num_decodes = std::max<int64_t>(num_decodes - 1, 0); }
};

class BudgetRule {
 public:
  explicit BudgetRule(const SchedulerConfig& config)
      : config_(config),
        pace_(config.max_stall_us),
        spread_(config.min_spread_tokens, config.max_num_batched_tokens) {}

  // What is planned: num_decodes decoding sequences, and some of what has prompts left.
  struct Step {
    int64_t num_decodes = 0;
    bool has_decodes = false;  // some sequence decodes, now or after this step
    int32_t num_shares = 1;    // so many steps are to have work at once
  };
  StepBudget next(const RequestBook& book, const KvCacheManager& kv_cache, const Step& step) const;

  // No sequence runs: a batch begins.
  void begin_batch() { spread_.begin_batch(); }
  // A step with prompt tokens, of num_tokens in all, has taken this long.
  void note_step(int64_t num_tokens, int64_t elapsed_us) {
    pace_.note_step(num_tokens, elapsed_us);
    spread_.note_step(num_tokens, elapsed_us);
  }

 private:
  int64_t share_tokens(const RequestBook& book, const Step& step) const;
  int64_t spread_tokens(const RequestBook& book, const KvCacheManager& kv_cache,
                        int64_t num_decodes) const;

  const SchedulerConfig& config_;
  StepPace pace_;
  SpreadSize spread_;
};

}  // namespace llmserve
