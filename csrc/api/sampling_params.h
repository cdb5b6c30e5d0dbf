// How the tokens of one request are chosen and when it ends. Names and defaults as users of the
// field know them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llmserve {

inline constexpr int32_t kMaxNumSamples = 128;
// Below this temperature the choice is greedy.
inline constexpr float kGreedyTemperature = 1e-5f;

struct SamplingParams {
  int32_t n = 1;             // sequences sampled from the prompt, 1..128
  float temperature = 1.0f;  // >= 0; under 1e-5 is greedy
  float top_p = 1.0f;        // (0, 1]
  int32_t top_k = 0;         // 0 or -1: all
  float min_p = 0.0f;        // [0, 1], relative to the most likely token
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;        // not empty strings; compared as bytes of the text
  std::vector<int32_t> stop_token_ids;  // in addition to the model's end-of-sequence ids
  bool ignore_eos = false;
  int32_t max_tokens = 16;  // >= 1
  int32_t min_tokens = 0;   // no stop before; <= max_tokens
  std::optional<int32_t>
      logprobs;  // how many of the most likely tokens to report; none: no logprobs at all
  bool detokenize = true;
  bool skip_special_tokens = true;
  bool include_stop_str_in_output = false;

  bool is_greedy() const { return temperature < kGreedyTemperature; }

  // Throws InvalidArgument that names the field, the range and the value.
  void validate() const;
};

}  // namespace llmserve
