#include "sampling/sampler.h"

namespace llmserve {

SampleRow make_sample_row(const SamplingParams& params, uint64_t seed, int64_t position,
                          std::span<const int32_t> banned_token_ids) {
  return {.temperature = params.temperature,
          .top_k = params.top_k,
          .top_p = params.top_p,
          .min_p = params.min_p,
          .seed = seed,
          .position = position,
          .num_top = params.logprobs.value_or(-1),
          .banned_token_ids = banned_token_ids};
}

void Sampler::sample(const ConstTensor& logits, std::span<const SampleRow> rows,
                     SampledTokens& out) {
  if (drawn_.size() < rows.size()) drawn_.resize(rows.size());
  const std::span<SampledRow> drawn(drawn_.data(), rows.size());
  backend_.sample({.logits = logits, .rows = rows, .out = drawn});
  for (const SampledRow& row : drawn) {
    SampledToken token{.token_id = row.token_id,
                       .logprob = row.logprob,
                       .rank = row.rank,
                       .is_valid = row.is_valid};
    token.top_begin = static_cast<int32_t>(out.tops.size());
    token.num_top = static_cast<int32_t>(row.top.size());
    for (const TopToken& top : row.top) {
      out.tops.push_back({.token_id = top.token_id, .logprob = top.logprob, .rank = top.rank});
    }
    out.rows.push_back(token);
  }
}

}  // namespace llmserve
