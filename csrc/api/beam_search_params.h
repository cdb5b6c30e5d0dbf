// A request that looks for the most likely continuations.
#pragma once

#include <cstdint>

namespace llmserve {

inline constexpr int32_t kMaxBeamWidth = 64;

// max_tokens and ignore_eos are those of SamplingParams, whose other fields have no part in it.
struct BeamSearchParams {
  int32_t beam_width = 1;       // continuations kept at each token, 1..64
  double length_penalty = 1.0;  // score = cumulative logprob / tokens^length_penalty

  int32_t num_candidates() const { return 2 * beam_width; }  // next tokens that a beam proposes
  // Throws InvalidArgument that names the field, the range and the value.
  void validate() const;
};

}  // namespace llmserve
