// Finds out that a sequence's output ends in a pattern of tokens, several times in a row. The time
// a token depends only on the sizes of the patterns that are looked for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "api/sampling_params.h"

namespace llmserve {

class RepetitionDetector {
 public:
  explicit RepetitionDetector(const RepetitionDetection& params);

  // To be called after each token: `output` is all that was generated, that token last. True if the
  // output ends in a pattern of min_pattern_size to max_pattern_size tokens, min_count times or
  // more.
  bool append(std::span<const int32_t> output);

 private:
  int64_t min_size_;
  int64_t min_count_;
  // [sizes] for each pattern size p: how many of the last tokens equal the one p before them. The
  // last c * p tokens are a pattern c times if (c - 1) * p of them do.
  std::vector<int64_t> num_equal_;
};

}  // namespace llmserve
