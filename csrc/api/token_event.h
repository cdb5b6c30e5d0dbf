// What leaves the engine: news of one sequence of a request, in the order in which it happened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/request.h"
#include "api/sampled_tokens.h"

namespace llmserve {

// kInvalid is an error, too, of what the request itself asks: its rules leave no token to draw, its
// grammar cannot be followed, its logits processor fails. Others have no part in it.
enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError, kInvalid };
inline constexpr size_t kNumFinishReasons = 6;

// In place of a stop string where a repetition ended the sequence.
inline constexpr const char* kRepetitionDetected = "repetition_detected";

// Microseconds on the engine's clock; 0 where it has not happened.
struct RequestTimes {
  int64_t arrival_us = 0;
  int64_t scheduled_us = 0;  // first time in a step
  int64_t first_token_us = 0;
  int64_t last_token_us = 0;
};

struct TokenEvent {
  RequestId request_id = 0;
  int32_t sample_index = 0;            // which of the request's n sequences
  std::vector<int32_t> token_ids;      // new tokens; a stop token is included, as its text is not
  std::string text;                    // new text: whole UTF-8 characters, never taken back
  std::vector<TokenLogprob> logprobs;  // of the new tokens, where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // likewise, best first
  // Of the prompt's tokens from the second on, where asked for: in the first event that follows the
  // prompt, of sample 0.
  std::vector<TokenLogprob> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;
  std::shared_ptr<const PooledOutput> pooled;  // of a request that asked for it, at its end
  FinishReason finish_reason = FinishReason::kNone;
  int32_t stop_token_id = -1;     // the id that ended it, if one did
  std::string stop_string;        // the string that ended it, if one did, or kRepetitionDetected
  std::string error;              // for kError and kInvalid: what happened and what to do
  int64_t num_cached_tokens = 0;  // prompt tokens that were read from the prefix cache
  int32_t num_preemptions = 0;
  int64_t num_draft_tokens = 0;     // of the sequence up to now: guesses that were run
  int64_t num_accepted_tokens = 0;  // of them, those that were right
  uint64_t seed = 0;                // the sequence's own
  int64_t num_generated = 0;        // tokens of the sequence up to now
  RequestTimes times;
  bool is_request_finished = false;  // last event of the whole request
};

}  // namespace llmserve
