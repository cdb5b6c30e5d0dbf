#include "scheduler/step_budget.h"

#include <algorithm>
#include <limits>

namespace llmserve {

DecisionKind chunked_kind(BudgetBound bound) {
  switch (bound) {
    case BudgetBound::kPace:
      return DecisionKind::kChunkedForPace;
    case BudgetBound::kSpread:
      return DecisionKind::kChunkedToSpread;
    case BudgetBound::kStep:
      break;
  }
  return DecisionKind::kChunked;
}

DecisionKind waits_kind(BudgetBound bound) {
  switch (bound) {
    case BudgetBound::kPace:
      return DecisionKind::kWaitsForPace;
    case BudgetBound::kSpread:
      return DecisionKind::kWaitsToSpread;
    case BudgetBound::kStep:
      break;
  }
  return DecisionKind::kWaitsForBudget;
}

StepBudget BudgetRule::next(const RequestBook& book, const KvCacheManager& kv_cache,
                            const Step& step) const {
  const int64_t num_decodes = step.num_decodes;
  StepBudget budget{.num_tokens = share_tokens(book, step), .num_decodes = num_decodes};
  if (!step.has_decodes) return budget;
  const auto bound_by = [&](int64_t num_tokens, BudgetBound bound) {
    if (num_tokens >= budget.num_tokens) return;
    budget.num_tokens = num_tokens;
    budget.bound = bound;
  };
  bound_by(pace_.max_tokens(num_decodes), BudgetBound::kPace);
  bound_by(spread_tokens(book, kv_cache, num_decodes), BudgetBound::kSpread);
  return budget;
}

// max_num_batched_tokens, or less where several steps are to have work: of n chunks in k stages the
// last ends after n + k - 1 of the times that one takes, so that 4 k chunks are a few percent from
// the best. Smaller ones than kMinShare cost more than they gain: weights are read for each.
int64_t BudgetRule::share_tokens(const RequestBook& book, const Step& step) const {
  constexpr int64_t kChunksAStep = 4;
  constexpr int64_t kMinShare = 128;
  const int64_t limit = config_.max_num_batched_tokens;
  if (step.num_shares == 1 || !config_.enable_chunked_prefill) return limit;
  const int64_t num_chunks = kChunksAStep * step.num_shares;
  int64_t num_left = 0;
  const auto count = [&](const Sequence* sequence) {
    if (sequence->num_to_run() > 1) num_left += sequence->num_to_run();
    return num_left < num_chunks * limit;
  };
  if (!std::ranges::all_of(book.running(), count) || !std::ranges::all_of(book.waiting(), count))
    return limit;
  const int64_t share = std::max((num_left + num_chunks - 1) / num_chunks, kMinShare);
  return std::min(step.num_decodes + share, limit);
}

// Tokens of this step with which each prompt, in its turn, has run as many steps before the batch
// ends as its request may generate tokens; whoever streams has no time. No bound where more wait
// than there are seats or blocks for: those behind need them.
int64_t BudgetRule::spread_tokens(const RequestBook& book, const KvCacheManager& kv_cache,
                                  int64_t num_decodes) const {
  constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();
  if (config_.min_spread_tokens == 0) return kNoBound;
  const auto num_to_generate = [](const Sequence& sequence) {
    return sequence.max_tokens - sequence.num_generated();
  };
  int64_t num_samples = 0;
  int64_t num_steps = 0;  // that the batch takes
  const auto count = [&](const Sequence* sequence) {
    num_samples += sequence->num_samples;
    num_steps = std::max(num_steps, num_to_generate(*sequence));
    return num_samples <= book.running().num_seats();
  };
  if (!std::ranges::all_of(book.running(), count) || !std::ranges::all_of(book.waiting(), count))
    return kNoBound;
  int64_t num_in_turn = 0;
  int64_t num_due = 0;
  const auto take_turn = [&](const Sequence& sequence) {
    if (sequence.num_to_run() <= 1) return;
    num_in_turn += sequence.num_to_run();
    // The step that ends a prompt draws the first token, too.
    const int64_t num_spare_steps =
        sequence.is_streamed ? 1 : num_steps - num_to_generate(sequence) + 1;
    num_due = std::max(num_due, (num_in_turn + num_spare_steps - 1) / num_spare_steps);
  };
  for (const Sequence* sequence : book.running()) take_turn(*sequence);
  const int64_t num_entered = num_in_turn;
  for (const Sequence* sequence : book.waiting()) take_turn(*sequence);
  const int64_t num_blocks_left = kv_cache.num_blocks() - kv_cache.num_used_blocks();
  if (num_due == 0 || kv_cache.num_blocks_for(num_in_turn - num_entered) > num_blocks_left)
    return kNoBound;
  return std::max(spread_.num_tokens(), num_decodes + num_due);
}

}  // namespace llmserve
