// How the tokens of one request are chosen and when it ends. Names and defaults as users of the
// field know them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/draw_settings.h"

namespace llmserve {

class LogitsProcessor;  // sampling/logits_processor.h
class TokenGrammar;     // text/token_mask.h

inline constexpr int32_t kMaxNumSamples = 128;
inline constexpr float kMaxLogitBias = 100.0f;
inline constexpr size_t kMaxLogprobTokenIds = 128;
// Bounds what looking for a repetition costs a token.
inline constexpr int32_t kMaxPatternSize = 1024;

// Ends a sequence whose output ends in a pattern of tokens, repeated.
struct RepetitionDetection {
  int32_t max_pattern_size = 0;  // tokens, 1..kMaxPatternSize
  int32_t min_pattern_size = 0;  // 0 is 1; <= max_pattern_size
  int32_t min_count = 0;         // times that the pattern stands there, >= 2

  void validate() const;
};

// Bounds the sections that a start sequence opens and an end sequence closes. Those of the prompt
// count as opened; their tokens in the prompt do not count.
struct ThinkingBudget {
  int32_t max_tokens = 0;  // drawn in a section before its end is forced; >= 0
  std::vector<int32_t> start_token_ids;
  std::vector<int32_t> end_token_ids;

  void validate() const;
};

struct SamplingParams {
  int32_t n = 1;  // sequences sampled from the prompt, 1..128
  DrawSettings draw;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;        // not empty strings; compared as bytes of the text
  std::vector<int32_t> stop_token_ids;  // in addition to the model's end-of-sequence ids
  bool ignore_eos = false;
  int32_t max_tokens = 16;          // >= 1
  int32_t min_tokens = 0;           // no stop before; <= max_tokens
  std::optional<int32_t> logprobs;  // how many of the most likely tokens to report, -1: all; none:
                                    // no logprobs at all
  std::vector<int32_t> logprob_token_ids;  // whose logprobs to report besides; at most 128
  std::optional<int32_t> prompt_logprobs;  // the same for the prompt's tokens; -1: all
  bool detokenize = true;
  bool skip_special_tokens = true;
  bool spaces_between_special_tokens = true;
  bool include_stop_str_in_output = false;
  std::vector<std::pair<int32_t, float>> logit_bias;      // (token id, within ±100), each id once
  std::optional<std::vector<int32_t>> allowed_token_ids;  // no others are drawn; not empty
  std::vector<std::vector<int32_t>> bad_words;  // as token ids: the last of one is not drawn where
                                                // the output ends in those before it
  bool skip_reading_prefix_cache = false;
  std::optional<ThinkingBudget> thinking_budget;
  std::optional<RepetitionDetection> repetition_detection;
  // Change the draw's copy of the logits, in this order, before all else does.
  std::vector<std::shared_ptr<LogitsProcessor>> logits_processors;
  std::shared_ptr<TokenGrammar> grammar;  // of the text, or none

  bool has_logprobs() const { return logprobs.has_value() || !logprob_token_ids.empty(); }

  // The draw needs the logits and the numbers of a SampleRow alone: it is the same without the
  // tokens before it, and nothing of the row is reported.
  bool only_draws() const {
    const bool is_edited = draw.has_penalties() || allowed_token_ids || thinking_budget ||
                           !logit_bias.empty() || !bad_words.empty() ||
                           !logits_processors.empty() || grammar;
    return !is_edited && !has_logprobs();
  }

  // The draw needs more of the tokens before it than how often each was there, or needs the host:
  // it cannot be asked for while the newest of them is on its way.
  bool needs_newest_token() const {
    return thinking_budget || !bad_words.empty() || !logits_processors.empty() || grammar;
  }

  // Throws InvalidArgument that names the field, the range and the value, or the fields that
  // contradict each other.
  void validate() const;
  // Throws InvalidArgument that names a field with a token id outside [0, vocab_size).
  void validate_token_ids(int64_t vocab_size) const;
};

}  // namespace llmserve
