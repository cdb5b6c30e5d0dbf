// What the sampler hands back: one record a logit row of the plan, in the plan's order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmserve {

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0;  // natural log, of the raw distribution
  int32_t rank = 0;   // 1 is the most likely
};

struct SampledToken {
  int32_t token_id = 0;
  float logprob = 0;     // valid when the row asked for logprobs
  int32_t rank = 0;      // likewise
  bool is_valid = true;  // false: nothing could be drawn; its request fails alone
  bool is_end = false;   // the text cannot go on: this token ends it, whatever else was asked for
  bool awaits_mask = false;  // nothing was drawn: the row's grammar mask is still being made
  int32_t error_idx = -1;    // why, in `errors`; -1: the row's logits were not finite
  int32_t top_begin =
      0;  // the most likely tokens: tops[top_begin, top_begin + num_top), best first
  int32_t num_top = 0;
};

struct SampledTokens {
  std::vector<SampledToken> rows;  // [S]
  std::vector<TokenLogprob> tops;
  std::vector<std::string> errors;

  std::span<const TokenLogprob> top(const SampledToken& row) const {
    return {tops.data() + row.top_begin, static_cast<size_t>(row.num_top)};
  }
  void clear() {
    rows.clear();
    tops.clear();
    errors.clear();
  }
};

}  // namespace llmserve
