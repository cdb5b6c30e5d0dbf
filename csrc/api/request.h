// What enters the engine: one prompt and how to continue it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/sampling_params.h"

namespace llmserve {

using RequestId = int64_t;

struct Request {
  RequestId id = 0;                       // given by the engine, increasing
  std::vector<int32_t> prompt_token_ids;  // [>= 1], each in [0, vocab)
  SamplingParams params;
  uint64_t seed =
      0;  // resolved: params.seed, or a hash of the engine's seed and the request's number
  int32_t priority = 0;    // lower runs earlier, where the policy looks at it
  std::string cache_salt;  // requests share cached blocks only within one salt
  int64_t arrival_us = 0;  // on the engine's clock
};

}  // namespace llmserve
