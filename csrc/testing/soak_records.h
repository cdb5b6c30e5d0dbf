// What the soak of the scheduler knows of its requests beside the scheduler.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "api/request.h"

namespace llmserve::soak {

// What a request asked for, and how far each of its samples has come.
struct Sample {
  std::vector<int32_t> token_ids;  // prompt, then generated
  uint64_t seed = 0;
  bool is_finished = false;
  bool is_spoiled = false;  // its logits were made invalid
};
struct Asked {
  SamplingParams params;
  int64_t num_prompt_tokens = 0;
  std::optional<AdapterRef> adapter;
  std::optional<HandOver> send_to;
  bool is_cut_short = false;  // aborted, or failed with all the others
  std::vector<Sample> samples;
};

// A sequence that has ended, and whose blocks are on their way to a peer, or there.
struct HandedOver {
  HandOver hand_over;
  std::vector<int32_t> token_ids;
  std::optional<AdapterRef> adapter;
};

}  // namespace llmserve::soak
