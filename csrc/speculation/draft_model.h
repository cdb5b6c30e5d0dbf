// A draft model's forward pass, which the engine carries out beside the target's: the drafter plans
// its steps and has its KV cache's books.
#pragma once

#include <cstdint>
#include <span>

#include "api/engine_config.h"
#include "api/sampled_tokens.h"
#include "scheduler/step_plan.h"
#include "speculation/draft_tree.h"

namespace llmserve {

// What a row of logits follows: committed tokens with guesses behind them.
struct DraftContext {
  std::span<const int32_t> token_ids;  // [position] all before the token to be drawn
  int32_t num_drafted = 0;             // of them, the last
  int32_t num_choices = 1;  // different tokens that are wanted, each without those before
};

class DraftModel {
 public:
  virtual ~DraftModel() = default;

  // Of its own pool.
  virtual const CacheConfig& cache() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t max_step_tokens() const = 0;

  // Runs the plan's sequences, whose blocks are of cache(), and draws a token for each logit row,
  // whose context is contexts[row]. Valid until the next call. Throws what a step throws.
  virtual const SampledTokens& run(const StepPlan& plan,
                                   std::span<const DraftContext> contexts) = 0;
  // Of a row of the last run() where several were wanted, what was drawn, in order; fewer where no
  // more are left.
  virtual std::span<const DraftChoice> choices(size_t row) const = 0;
  // The sample has ended.
  virtual void forget(RequestId request_id, int32_t sample_index) = 0;
};

}  // namespace llmserve
