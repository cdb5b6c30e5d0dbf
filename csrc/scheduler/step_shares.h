// Among how many steps in flight the sequences that decode are shared out: as many as there can be,
// or fewer, by what a token has cost with each.
//
// Each step reads the weights. Where that takes as long for half of the rows, and the steps share
// the memory that they read from, two steps at once of half the rows give fewer tokens than one of
// all. Where a row costs more, or each stage has a memory of its own, they give as many or more. So
// both are tried for each power of two of sequences, the better is kept, and tried again later.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmserve {

class StepShares {
 public:
  explicit StepShares(int32_t max_shares);

  // Of a step in which so many sequences would decode, those in flight among them.
  int32_t of(int64_t num_decoding) const;
  // A step without prompts, planned when so many decoded and they were shared out like that, gave
  // num_tokens in this time after the step before it. Where no time passes (a test's clock) all are
  // alike, and the most shares are kept.
  void note_step(int64_t num_decoding, int32_t num_shares, int64_t num_tokens, int64_t elapsed_us);

 private:
  static constexpr size_t kNumSizes = 16;
  // Of one power of two of sequences.
  struct Size {
    std::vector<double> us_per_token;  // [choices], of the last trials
    size_t choice = 0;                 // that is tried, or was best
    bool is_trial = true;
    int32_t num_steps = 0;  // with it
    int64_t num_tokens = 0;
    int64_t elapsed_us = 0;
  };

  static size_t idx(int64_t num_decoding);
  void end_trial(Size& size) const;

  std::vector<int32_t> choices_;  // the most first
  std::array<Size, kNumSizes> sizes_;
};

}  // namespace llmserve
