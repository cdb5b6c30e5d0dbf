// How many tokens a step of a spread batch takes at least (SchedulerConfig::min_spread_tokens).
//
// Where a machine multiplies much faster than it reads weights, as with many cores or AMX, so many
// tokens do not hide the reading: if steps of about this size run their tokens at a rate well below
// that of larger ones, the next take twice as many, and so on. Decodes count as any token: where
// many of them have a large vocabulary to score, steps may grow without need. Each batch begins
// with the smallest again: what was slow may have been a neighbour. Where no time passes (a test's
// clock) nothing changes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace llmserve {

class SpreadSize {
 public:
  // min_tokens: 0 if batches are not spread.
  SpreadSize(int64_t min_tokens, int64_t max_tokens)
      : min_tokens_(min_tokens), max_tokens_(max_tokens), num_tokens_(min_tokens) {}

  // Twice as many once, if no step has told yet how fast larger ones are.
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
  // Tokens over time of the fastest step: what holds one up has nothing to do with its size.
  struct Rate {
    int num_steps = 0;
    double per_us = 0;
    void note(int64_t tokens, int64_t us) {
      ++num_steps;
      per_us = std::max(per_us, static_cast<double>(tokens) / static_cast<double>(us));
    }
  };

  static constexpr int kStepsToTell = 3;
  // Below it, what spreading saves of a batch's last steps is lost in its first.
  static constexpr double kEnough = 0.8;

  const int64_t min_tokens_;
  const int64_t max_tokens_;
  int64_t num_tokens_;
  Rate large_;
  Rate small_;
};

}  // namespace llmserve
