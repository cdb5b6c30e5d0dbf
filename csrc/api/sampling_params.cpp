#include "api/sampling_params.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <unordered_set>

#include "core/error.h"

namespace llmserve {
namespace {

template <class Value>
void require(bool holds, const char* rule, const Value& value) {
  if (!holds) throw InvalidArgument(concat(rule, ", got ", value));
}

void check_ids(const char* field, std::span<const int32_t> ids, int64_t vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      throw InvalidArgument(
          concat(field, ": token id ", id, " is outside the vocabulary [0, ", vocab_size, ")"));
    }
  }
}

// Some token must be left to draw, whatever has been drawn.
void check_choice(const SamplingParams& params) {
  const std::vector<int32_t>& allowed = *params.allowed_token_ids;
  if (allowed.empty()) {
    throw InvalidArgument(
        "allowed_token_ids must name at least one token; leave it out to allow all");
  }
  std::unordered_set<int32_t> banned;
  for (const std::vector<int32_t>& word : params.bad_words)
    if (word.size() == 1) banned.insert(word[0]);
  const auto is_banned = [&](int32_t id) { return banned.contains(id); };
  if (std::ranges::all_of(allowed, is_banned))
    throw InvalidArgument("allowed_token_ids and bad_words leave no token to draw");
  if (params.min_tokens == 0) return;
  banned.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
  if (std::ranges::all_of(allowed, is_banned)) {
    throw InvalidArgument(concat("allowed_token_ids holds nothing but stop_token_ids, which ",
                                 "min_tokens=", params.min_tokens, " rules out"));
  }
}

void check_edits(const SamplingParams& params) {
  for (const auto& [id, bias] : params.logit_bias) {
    if (!(std::fabs(bias) <= kMaxLogitBias)) {
      throw InvalidArgument(
          concat("logit_bias must be between -100 and 100, got ", bias, " for token ", id));
    }
  }
  for (const std::vector<int32_t>& word : params.bad_words) {
    if (word.empty()) throw InvalidArgument("bad_words must not contain a word without tokens");
  }
  if (params.allowed_token_ids) check_choice(params);
}

}  // namespace

void RepetitionDetection::validate() const {
  require(max_pattern_size >= 1 && max_pattern_size <= kMaxPatternSize,
          "repetition_detection: max_pattern_size must be between 1 and 1024", max_pattern_size);
  if (min_pattern_size < 0 || min_pattern_size > max_pattern_size) {
    throw InvalidArgument(
        concat("repetition_detection: min_pattern_size must be between 0 and max_pattern_size=",
               max_pattern_size, ", got ", min_pattern_size));
  }
  require(min_count >= 2, "repetition_detection: min_count must be at least 2", min_count);
}

void ThinkingBudget::validate() const {
  require(max_tokens >= 0, "thinking_token_budget must be at least 0", max_tokens);
  if (start_token_ids.empty() || end_token_ids.empty()) {
    throw InvalidArgument("thinking_token_budget needs the tokens that open and close a section");
  }
}

void SamplingParams::validate() const {
  require(n >= 1 && n <= kMaxNumSamples, "n must be between 1 and 128", n);
  draw.validate();
  require(max_tokens >= 1, "max_tokens must be at least 1", max_tokens);
  require(min_tokens >= 0, "min_tokens must be at least 0", min_tokens);
  if (min_tokens > max_tokens) {
    throw InvalidArgument(
        concat("min_tokens must not exceed max_tokens=", max_tokens, ", got ", min_tokens));
  }
  if (logprobs) require(*logprobs >= -1, "logprobs must be at least 0, or -1 for all", *logprobs);
  require(logprob_token_ids.size() <= kMaxLogprobTokenIds,
          "logprob_token_ids must be at most 128 tokens", logprob_token_ids.size());
  if (prompt_logprobs) {
    require(*prompt_logprobs >= -1, "prompt_logprobs must be -1 (all) or at least 0",
            *prompt_logprobs);
  }
  for (const std::string& text : stop) {
    if (text.empty()) throw InvalidArgument("stop must not contain an empty string");
  }
  if (!stop.empty() && !detokenize) {
    throw InvalidArgument("stop strings need detokenize=True, since they are found in the text");
  }
  check_edits(*this);
  if (thinking_budget) thinking_budget->validate();
  if (repetition_detection) repetition_detection->validate();
}

void SamplingParams::validate_token_ids(int64_t vocab_size) const {
  check_ids("stop_token_ids", stop_token_ids, vocab_size);
  check_ids("logprob_token_ids", logprob_token_ids, vocab_size);
  for (const auto& bias : logit_bias) check_ids("logit_bias", {&bias.first, 1}, vocab_size);
  if (allowed_token_ids) check_ids("allowed_token_ids", *allowed_token_ids, vocab_size);
  for (const std::vector<int32_t>& word : bad_words) check_ids("bad_words", word, vocab_size);
  if (thinking_budget) {
    check_ids("reasoning_config", thinking_budget->start_token_ids, vocab_size);
    check_ids("reasoning_config", thinking_budget->end_token_ids, vocab_size);
  }
}

}  // namespace llmserve
