// How many tokens a step of a spread batch takes at least (SchedulerConfig::min_spread_tokens).
//
// A machine with many cores or AMX multiplies much faster than it reads weights. There
// min_spread_tokens do not hide the reading. So if steps of about this size have a token rate well
// below that of larger steps, the next steps take twice as many tokens, and so on. Decodes count as
// any token: where many of them have a large vocabulary to score, steps may grow without need. Each
// batch begins with the smallest size again, since another program may have slowed the last one.
// Where no time passes (a test's clock) nothing changes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace llmserve {

class SpreadSize {
 public:
  // min_tokens: 0 if batches are not spread.
  SpreadSize(int64_t min_tokens, int64_t max_tokens)
      : min_tokens_(min_tokens), max_tokens_(max_tokens), num_tokens_(min_tokens) {}

  // Tokens of the next step. It is doubled for one step while the rate of larger steps is unknown.
  int64_t num_tokens() const {
    const bool is_probe = small_.num_steps >= kStepsToTell && large_.num_steps == 0;
    return is_probe ? std::min(2 * num_tokens_, max_tokens_) : num_tokens_;
  }

  void begin_batch() {
    num_tokens_ = min_tokens_;
    small_ = {};
  }

  // A step with prompt tokens, of num_tokens in all, has taken this long.
  void note_step(int64_t num_tokens, int64_t elapsed_us) {
    if (elapsed_us <= 0 || num_tokens < num_tokens_) return;
    if (num_tokens >= 2 * num_tokens_) {
      large_.note(num_tokens, elapsed_us);
      return;
    }
    small_.note(num_tokens, elapsed_us);
    if (small_.num_steps < kStepsToTell || small_.per_us >= kEnough * large_.per_us) return;
    num_tokens_ = std::min(2 * num_tokens_, max_tokens_);
    small_ = {};
  }

 private:
  // Tokens over time of the fastest step: a delay has nothing to do with a step's size.
  struct Rate {
    int num_steps = 0;
    double per_us = 0;
    void note(int64_t tokens, int64_t us) {
      ++num_steps;
      per_us = std::max(per_us, static_cast<double>(tokens) / static_cast<double>(us));
    }
  };

  static constexpr int kStepsToTell = 3;
  // Below this ratio the batch's first steps lose more time than spreading saves in its last ones.
  static constexpr double kEnough = 0.8;

  const int64_t min_tokens_;
  const int64_t max_tokens_;
  int64_t num_tokens_;
  Rate large_;
  Rate small_;
};

}  // namespace llmserve
