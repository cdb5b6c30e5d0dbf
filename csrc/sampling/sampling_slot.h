// What the sampler keeps of one sequence from step to step: what its parameters ask for beyond the
// plain settings of a row. A step costs what the new token costs, not what the context would.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "api/request.h"
#include "core/memory.h"
#include "kernels/ops.h"
#include "sampling/thinking_section.h"
#include "sampling/token_counts.h"

namespace llmserve {

// One token to draw, and whose it is.
struct SampleTask {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  const SamplingParams* params = nullptr;  // lives as long as its request
  uint64_t seed = 0;
  int64_t position = 0;                // of the token to be drawn
  int32_t given_token_id = -1;         // >= 0: a prompt's token to be scored; nothing is drawn
  std::span<const int32_t> token_ids;  // [position] prompt, then output; or less the late one
  int64_t num_prompt_tokens = 0;       // of those
  int32_t late_token = -1;             // >= 0: the batch's token that token_ids lacks, on its way
  bool only_draws = false;             // as LogitRow has it
  std::span<const int32_t> banned_token_ids;
  // What the request's grammar says.
  std::span<const uint32_t> allowed;  // [ceil(V / 32)] bits, as in SampleRow; empty: all
  int32_t end_token_id = -1;          // >= 0: nothing may come but this, the text's end
  std::string_view mask_error;        // why there is no mask, where there should be
};

class SamplingSlot {
 public:
  // Whether a sequence with these parameters needs one.
  static bool is_needed(const SamplingParams& params);

  SamplingSlot(const SamplingParams& params, int64_t vocab_size);

  // Takes in the tokens that came since the last call, and sets the row's edits; they point into
  // the slot and the task and stay valid until the next call. Tokens that were seen do not change:
  // a preempted sequence goes on where it was. logits [V] lie in `memory`. Throws what a logits
  // processor throws, and InvalidArgument if one leaves a logit that is NaN or +inf.
  void prepare(const SampleTask& task, const ConstTensor& logits, Memory& memory, SampleRow& row);

 private:
  void take_in(const SampleTask& task);
  void ban(const SampleTask& task);
  std::span<const uint32_t> allow(const SampleTask& task);
  void process(const SampleTask& task, const ConstTensor& logits, Memory& memory);

  const SamplingParams& params_;
  size_t num_seen_ = 0;  // tokens
  TokenCounts counts_;   // empty without penalties
  std::optional<ThinkingSection> thinking_;
  std::vector<TokenBias> biases_;
  std::vector<uint32_t> allowed_;   // [ceil(V / 32)], or empty: all
  std::vector<uint32_t> both_;      // likewise: what the grammar allows of them
  std::vector<int32_t> banned_;     // of the step
  std::vector<float> draw_logits_;  // [V], or empty: no processors
};

}  // namespace llmserve
