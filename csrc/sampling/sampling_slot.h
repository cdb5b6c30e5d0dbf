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
  // Of those, the last ones: drafted, and run in this step. The token to be drawn counts only if
  // each of them is drawn by the row before it. A sequence's rows have 0, 1, 2 … of them, in order.
  int32_t num_drafted_tokens = 0;
  int32_t late_token = -1;  // >= 0: the batch's token that token_ids lacks, on its way
  bool only_draws = false;  // as LogitRow has it
  std::span<const int32_t> banned_token_ids;
  // What the request's grammar says.
  std::span<const uint32_t> allowed;  // [ceil(V / 32)] bits, as in SampleRow; empty: all
  int32_t end_token_id = -1;          // >= 0: nothing may come but this, the text's end
  std::string_view mask_error;        // why there is no mask, where there should be
  bool can_await_mask = false;        // the sequence's last token may run again in a later step
  bool awaits_mask = false;           // there is no mask yet: nothing is drawn
  // Under the rejection rule (sampling/rejection.h), where the draw is not greedy. Of the target's
  // rows: the guess that ran in the token's place, and [V] what it was drawn from, or empty. Of a
  // draft's rows: where what the token is drawn from goes, [V].
  int32_t guess = -1;
  std::span<const float> guess_probabilities;
  std::vector<float>* drawn_from = nullptr;

  // What is certain of token_ids.
  std::span<const int32_t> committed_token_ids() const {
    return token_ids.first(token_ids.size() - static_cast<size_t>(num_drafted_tokens));
  }
};

class SamplingSlot {
 public:
  // Whether a sequence with these parameters needs one.
  static bool is_needed(const SamplingParams& params);

  SamplingSlot(const SamplingParams& params, int64_t vocab_size);

  // Of the counts that its rows have which follow no drafted tokens.
  const TokenCounts& counts() const { return counts_; }

  // Takes in the committed tokens that came since the last call, and sets the row's edits; they
  // point into the slot and the task. Those of a row after drafted tokens are made on a copy, so
  // that a draft which is not accepted leaves nothing behind. They stay valid until the next call
  // for as many drafted tokens, or with other committed ones. Committed tokens do not change: a
  // preempted sequence goes on where it was. logits [V] lie in `memory`. Throws what a logits
  // processor throws, and InvalidArgument if one leaves a logit that is NaN or +inf.
  void prepare(const SampleTask& task, const ConstTensor& logits, Memory& memory, SampleRow& row);

 private:
  // What one row's edits point to, where it is not the same for all rows.
  struct RowEdits {
    std::vector<TokenCount> counts;  // with the drafted tokens, where there are any
    std::vector<uint32_t> allowed;   // [ceil(V / 32)] by the parameters and by the grammar
    std::vector<int32_t> banned;
    std::vector<float> draw_logits;  // [V], or empty: no processors
  };

  void take_in(const SampleTask& task);
  std::span<const TokenCount> count(const SampleTask& task, RowEdits& edits) const;
  int32_t forced_token_id(const SampleTask& task) const;
  void ban(const SampleTask& task, RowEdits& edits) const;
  std::span<const uint32_t> allow(const SampleTask& task, RowEdits& edits) const;
  void process(const SampleTask& task, const ConstTensor& logits, Memory& memory,
               RowEdits& edits) const;

  const SamplingParams& params_;
  size_t num_seen_ = 0;                      // committed tokens
  TokenCounts counts_;                       // of those; empty without penalties
  std::optional<ThinkingSection> thinking_;  // likewise
  std::vector<TokenBias> biases_;
  std::vector<uint32_t> allowed_;  // [ceil(V / 32)], or empty: all
  std::vector<RowEdits> rows_;     // by the number of drafted tokens
};

}  // namespace llmserve
