// What enters the engine: one prompt and how to continue it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/adapter.h"
#include "api/beam_search_params.h"
#include "api/hand_over.h"
#include "api/pooling.h"
#include "api/sampling_params.h"
#include "core/host_array.h"

namespace llmserve {

using RequestId = int64_t;

// Stands in a prompt of embeddings for the ids that there are not.
inline constexpr int32_t kNoTokenId = -1;

struct Request {
  RequestId id = 0;                                // given by the engine, increasing
  std::vector<int32_t> prompt_token_ids;           // [T >= 1], each in [0, V), or kNoTokenId all
  std::shared_ptr<const HostArray> prompt_embeds;  // [T, E] or none: rows in the place of the ids
  SamplingParams params;
  std::optional<PoolingParams> pooling;         // hidden states are wanted and no tokens
  std::shared_ptr<PooledOutput> pooled;         // they go here; made at admission
  std::optional<BeamSearchParams> beam_search;  // the most likely continuations are wanted
  uint64_t seed =
      0;  // resolved: params.seed, or a hash of the engine's seed and the request's number
  int32_t priority = 0;    // lower runs earlier, where the policy looks at it
  std::string cache_salt;  // requests share cached blocks only within one salt
  std::string tenant;      // whom policies and quotas count it for; "": nobody's
  // Deadlines for the first token, and for each after the one before; 0: none. Policies read them.
  int64_t ttft_us = 0;
  int64_t tpot_us = 0;
  int64_t prefix_ttl_us = 0;  // how long its prompt's cached blocks are worth keeping; 0: as others
  std::optional<AdapterRef> adapter;  // whose weights are added to the model's
  // The blocks of its first tokens come from a peer, once; if they do not come, they are computed.
  std::optional<HandOver> receive_from;
  // When it has ended by a stop or its length, its blocks go to a peer.
  std::optional<HandOver> send_to;
  // Tokens that were generated, and given out, before: the request goes on after them, at their
  // positions and with its seed. They count as generated, and are in no event.
  std::vector<int32_t> resumed_token_ids;
  bool has_drafter = false;     // DraftReady may come for it
  bool awaits_grammar = false;  // it waits until GrammarReady brings params.grammar
  int64_t arrival_us = 0;       // on the engine's clock
  bool is_streamed = true;  // false: each sequence has one event, at its end, with everything in it
};

}  // namespace llmserve
