// Whether a request can be served at all: each request is checked once, here, before it is queued.
// Reads only what never changes, so that any thread may ask.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "api/request.h"
#include "kv_cache/kv_cache_manager.h"

namespace llmserve {

// The ids that end a sequence: the request's and, unless it ignores them, the model's. Sorted.
std::vector<int32_t> stop_token_ids(const SchedulerConfig& config, const SamplingParams& params);

// What a request may ask of the model behind the scheduler. A negative size is unknown and is not
// checked.
struct RequestLimits {
  int64_t vocab_size = -1;
  int64_t hidden_size = -1;
  int32_t max_logprobs = -1;    // -1: no bound
  bool must_make_text = false;  // a request for text is refused where there is no vocabulary
  bool has_adapters = true;
  bool has_peers = true;  // instances that KV blocks come from and go to
};

class RequestAdmission {
 public:
  // `config` and `kv_cache` outlive it.
  RequestAdmission(const SchedulerConfig& config, const KvCacheManager& kv_cache, bool makes_text,
                   const RequestLimits& limits)
      : config_(config), kv_cache_(kv_cache), makes_text_(makes_text), limits_(limits) {}

  // First resolves what the request left open: how many prompt_logprobs "all" are, and kNoTokenId
  // for each token of a prompt of embeddings. Then throws unless the request can run:
  // InvalidArgument for what can never be served, NotSupported for what no part of this engine does
  // yet, ResourceExhausted if the KV pool is smaller than the prompt and one token.
  void admit(Request& request) const;

  // Whether a sequence of so many tokens outgrows the pool by itself.
  bool outgrows_pool(int64_t num_tokens) const {
    return kv_cache_.num_blocks_for(num_tokens) > kv_cache_.num_blocks();
  }
  std::string outgrown_error(int64_t num_tokens) const;

 private:
  // "needs 7 blocks (100 tokens, block_size=16), but the KV pool has 6 (96 tokens)".
  std::string pool_arithmetic(int64_t num_tokens) const;
  void take_prompt_embeds(Request& request) const;
  void check_ids(const Request& request) const;
  void check_length(const Request& request) const;
  void check_logprobs(const SamplingParams& params) const;
  void check_adapter(const Request& request) const;
  void check_hand_over(const Request& request) const;
  void check_can_go_on(const SamplingParams& params) const;
  void check_resumed(const Request& request) const;

  const SchedulerConfig& config_;
  const KvCacheManager& kv_cache_;
  const bool makes_text_;
  const RequestLimits limits_;
};

}  // namespace llmserve
