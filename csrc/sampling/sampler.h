// Turns logits into tokens: gathers each row's settings for the backend's sample op and files what
// comes back.
#pragma once

#include <span>
#include <vector>

#include "api/sampled_tokens.h"
#include "api/sampling_params.h"
#include "kernels/backend.h"

namespace llmserve {

// The row of one sample: the part of `params` that the draw depends on.
SampleRow make_sample_row(const SamplingParams& params, uint64_t seed, int64_t position,
                          std::span<const int32_t> banned_token_ids);

class Sampler {
 public:
  explicit Sampler(Backend& backend) : backend_(backend) {}

  // Draws one token for each row of logits [S, V] and appends S records to `out`, in order.
  void sample(const ConstTensor& logits, std::span<const SampleRow> rows, SampledTokens& out);

 private:
  Backend& backend_;
  std::vector<SampledRow> drawn_;  // grows to the largest S, then stays
};

}  // namespace llmserve
