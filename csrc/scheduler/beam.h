// The records of a beam search.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "api/sampled_tokens.h"

namespace llmserve {

struct Sequence;

// The most likely next tokens after a sequence, best first; shared by all that continue it.
using Candidates = std::shared_ptr<const std::vector<TokenLogprob>>;

// What a sequence of a beam search carries besides its tokens.
struct Beam {
  double cumulative_logprob = 0;
  std::vector<TokenLogprob> logprobs;    // of the generated tokens
  std::vector<Candidates> top_logprobs;  // what each was chosen from
  // For the next token; null until they are known. A sequence that has them waits for the other
  // beams of its request, even without its blocks.
  Candidates candidates;
};

// A sequence with one more token.
struct BeamExtension {
  Sequence* parent = nullptr;
  TokenLogprob token;
  double cumulative_logprob = 0;
  double score = 0;  // the rank among extensions
};

// A continuation that has reached its end.
struct FinishedBeam {
  double score = 0;
  std::vector<int32_t> token_ids;  // generated, the end-of-sequence id included
  Beam beam;
  int32_t stop_token_id = -1;  // -1: its length ended it
};

}  // namespace llmserve
