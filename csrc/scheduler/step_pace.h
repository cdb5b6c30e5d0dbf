// The rate of recent steps with prompts, and how many tokens a step may take so that decoding
// sequences do not wait long for their next token.
//
// The rate is that of the last few such steps. Each step halves the weight of the steps before it,
// and longer steps count for more. A step longer than max_step_us counts as if it had been cut off
// there, so that one full step in an idle engine does not outweigh the shorter steps that follow.
// Where no time passes (a test's clock) there is no rate and no bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace llmserve {

class StepPace {
 public:
  // max_step_us: of a step in which sequences decode; 0: no bound.
  explicit StepPace(int64_t max_step_us) : max_step_us_(max_step_us) {}

  // A step with prompt tokens, of num_tokens in all, has taken this long.
  void note_step(int64_t num_tokens, int64_t elapsed_us) {
    if (elapsed_us <= 0) return;
    const double counted_us = static_cast<double>(std::min(elapsed_us, max_step_us_));
    const double share = counted_us / static_cast<double>(elapsed_us);
    num_tokens_ = num_tokens_ / 2 + share * static_cast<double>(num_tokens);
    elapsed_us_ = elapsed_us_ / 2 + counted_us;
  }

  // Tokens of a step in which num_decodes sequences decode. Prompts get on however slow the
  // machine: kMinPromptTokens rows cost little more than reading the weights, which each step does.
  int64_t max_tokens(int64_t num_decodes) const {
    if (max_step_us_ == 0 || elapsed_us_ == 0) return std::numeric_limits<int64_t>::max();
    const double num_in_time = num_tokens_ / elapsed_us_ * static_cast<double>(max_step_us_);
    return std::max<int64_t>(std::llround(num_in_time), num_decodes + kMinPromptTokens);
  }

 private:
  static constexpr int64_t kMinPromptTokens = 16;

  const int64_t max_step_us_;
  double num_tokens_ = 0;
  double elapsed_us_ = 0;
};

}  // namespace llmserve
