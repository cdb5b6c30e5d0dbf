// What a sequence of a beam search carries besides its tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "api/sampled_tokens.h"

namespace llmserve {

struct Sequence;

// The most likely next tokens after a sequence, best first; shared by all that continue it.
using Candidates = std::shared_ptr<const std::vector<TokenLogprob>>;

struct Beam {
  double cumulative_logprob = 0;
  std::vector<TokenLogprob> logprobs;    // of the generated tokens
  std::vector<Candidates> top_logprobs;  // what each was chosen from
  // Of the next token, once they are known: the sequence then waits for the other beams of its
  // request, even without its blocks.
  Candidates candidates;
};

// A sequence with one more token.
struct BeamExtension {
  Sequence* parent = nullptr;
  TokenLogprob token;
  double cumulative_logprob = 0;
  double score = 0;  // by which they are ranked
};

// A continuation that has reached its end.
struct FinishedBeam {
  double score = 0;
  std::vector<int32_t> token_ids;  // generated, the end-of-sequence id included
  Beam beam;
  int32_t stop_token_id = -1;  // -1: its length ended it
};

}  // namespace llmserve
