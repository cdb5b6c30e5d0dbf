// How fast steps with prompts have run of late, and how many tokens a step may take so that those
// who decode in it do not wait long for their next token.
//
// The rate is that of the last few such steps, longer ones counting for more: each step halves the
// weight of those before it. A step that took longer than it may counts as one that was cut off, so
// that one full step in an idle engine does not outweigh the shorter ones that follow. Where no
// time passes (a test's clock) there is no rate and no bound.
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

  // Tokens of a step in which num_decodes sequences decode. However slow the machine, prompts get
  // on: so many rows cost little more than the weights, which a step reads in any case.
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
