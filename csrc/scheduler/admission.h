// Whether a request can be served at all: whoever asks, this is the one check, before it is queued.
// Reads only what never changes, so that any thread may ask.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "api/request.h"
#include "core/error.h"
#include "kv_cache/kv_cache_manager.h"
#include "text/vocabulary.h"

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

// A prompt that the model's context does not hold (Python: an InvalidArgument of its own).
class PromptTooLong : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// Which of a call's requests one is. Messages say "prompts[2]" and "sampling_params[2]".
struct PlaceInCall {
  int64_t index = 0;
  int64_t num_requests = 0;  // of the call; 0: it has no parameters by the request

  std::string prompt() const;                        // a lone request's is "prompt"
  std::string params(const Request& request) const;  // "" without a call
};

class RequestAdmission {
 public:
  // `config`, `kv_cache` and `vocabulary` outlive it. `vocabulary` may be null: no text is made.
  RequestAdmission(const SchedulerConfig& config, const KvCacheManager& kv_cache,
                   const Vocabulary* vocabulary, const RequestLimits& limits)
      : config_(config), kv_cache_(kv_cache), vocabulary_(vocabulary), limits_(limits) {}

  // Throws unless the request can run, with a message that begins with its place: InvalidArgument
  // for what can never be served (PromptTooLong for a prompt beyond max_model_len), NotSupported
  // for what no part of this engine does yet, ResourceExhausted if the KV pool is smaller than the
  // prompt and one token, or if the answer of a pooling request is too large.
  void check(const Request& request, const PlaceInCall& place = {}) const;

  // Checks, then resolves what the request left open: how many prompt_logprobs "all" are, and
  // kNoTokenId for each token of a prompt of embeddings.
  void admit(Request& request, const PlaceInCall& place = {}) const;

  // Whether a sequence of so many tokens outgrows the pool by itself.
  bool outgrows_pool(int64_t num_tokens) const {
    return kv_cache_.num_blocks_for(num_tokens) > kv_cache_.num_blocks();
  }
  std::string outgrown_error(int64_t num_tokens) const;

 private:
  // "needs 7 blocks (100 tokens, block_size=16), but the KV pool has 6 (96 tokens)".
  std::string pool_arithmetic(int64_t num_tokens) const;
  bool takes_embeds(const Request& request) const;
  int64_t num_prompt_tokens(const Request& request) const;
  void check_prompt(const Request& request, const PlaceInCall& place) const;
  void check_embeds(const Request& request, const PlaceInCall& place) const;
  void check_ids(const Request& request, const PlaceInCall& place) const;
  void check_length(const Request& request, const PlaceInCall& place) const;
  void check_params(const Request& request) const;
  void check_logprobs(const SamplingParams& params) const;
  void check_adapter(const Request& request) const;
  void check_hand_over(const Request& request) const;
  void check_can_go_on(const SamplingParams& params) const;
  void check_resumed(const Request& request) const;
  void check_memory(const Request& request, const PlaceInCall& place) const;

  const SchedulerConfig& config_;
  const KvCacheManager& kv_cache_;
  const Vocabulary* const vocabulary_;
  const RequestLimits limits_;
};

}  // namespace llmserve
