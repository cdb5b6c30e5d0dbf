#include "scheduler/admission.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

std::vector<int32_t> stop_token_ids(const SchedulerConfig& config, const SamplingParams& params) {
  std::vector<int32_t> ids = params.stop_token_ids;
  if (!params.ignore_eos) {
    ids.insert(ids.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void RequestAdmission::admit(Request& request) const {
  std::optional<int32_t>& prompt_logprobs = request.params.prompt_logprobs;
  if (prompt_logprobs == -1 && limits_.vocab_size >= 0)
    prompt_logprobs = static_cast<int32_t>(limits_.vocab_size);
  if (limits_.hidden_size >= 0 && request.prompt_embeds) take_prompt_embeds(request);
  request.params.validate();
  check_ids(request);
  check_logprobs(request.params);
  if (limits_.must_make_text && request.params.detokenize && !makes_text_) {
    throw InvalidArgument("this engine has no tokenizer: pass detokenize=False and read token_ids");
  }
  check_adapter(request);
  check_hand_over(request);
  if (request.beam_search) request.beam_search->validate();
  if ((request.beam_search || request.pooling) && request.params.n != 1) {
    throw InvalidArgument(
        concat("n must be 1 for beam search and pooling, got ", request.params.n));
  }
  check_length(request);
  check_can_go_on(request.params);
  if (!makes_text_ && !request.params.stop.empty()) {
    throw InvalidArgument("stop strings need a vocabulary, and this engine makes no text");
  }
  check_resumed(request);
  const int64_t num_tokens =
      std::ssize(request.prompt_token_ids) + std::ssize(request.resumed_token_ids);
  const int64_t num_new_tokens = request.pooling ? 0 : 1;
  if (outgrows_pool(num_tokens + num_new_tokens)) {
    throw ResourceExhausted(concat("the prompt ", pool_arithmetic(num_tokens + num_new_tokens),
                                   "; raise num_blocks or shorten the prompt"));
  }
}

void RequestAdmission::take_prompt_embeds(Request& request) const {
  const HostArray& embeds = *request.prompt_embeds;
  if (!request.prompt_token_ids.empty())
    throw InvalidArgument("a prompt is token ids or prompt_embeds, not both");
  if (embeds.width != limits_.hidden_size) {
    throw InvalidArgument(concat("prompt_embeds: expected rows of the model's hidden size ",
                                 limits_.hidden_size, ", got shape [", embeds.num_rows, ", ",
                                 embeds.width, "]"));
  }
  if (request.params.prompt_logprobs)
    throw InvalidArgument("prompt_logprobs are of token ids, and prompt_embeds have none");
  request.prompt_token_ids.assign(static_cast<size_t>(embeds.num_rows), kNoTokenId);
}

void RequestAdmission::check_ids(const Request& request) const {
  if (limits_.vocab_size < 0) return;
  for (const int32_t id : request.prompt_token_ids) {
    if (request.prompt_embeds && id == kNoTokenId) continue;
    if (id < 0 || id >= limits_.vocab_size) {
      throw InvalidArgument(concat("prompt token id ", id, " is outside the vocabulary [0, ",
                                   limits_.vocab_size, ")"));
    }
  }
  request.params.validate_token_ids(limits_.vocab_size);
}

void RequestAdmission::check_logprobs(const SamplingParams& params) const {
  if (limits_.max_logprobs < 0) return;
  const int64_t num_logprobs = params.logprobs.value_or(0);
  if ((num_logprobs < 0 ? limits_.vocab_size : num_logprobs) > limits_.max_logprobs) {
    throw InvalidArgument(concat("logprobs must be at most max_logprobs=", limits_.max_logprobs,
                                 ", got ", num_logprobs, num_logprobs < 0 ? " (all)" : "",
                                 "; raise max_logprobs of the engine, -1 for no bound"));
  }
  if (params.prompt_logprobs.value_or(0) > limits_.max_logprobs) {
    throw InvalidArgument(
        concat("prompt_logprobs must be at most max_logprobs=", limits_.max_logprobs, ", got ",
               *params.prompt_logprobs, "; raise max_logprobs of the engine"));
  }
}

void RequestAdmission::check_length(const Request& request) const {
  const int64_t num_tokens = std::ssize(request.prompt_token_ids);
  const int64_t num_new_tokens = request.pooling ? 0 : 1;  // at least
  if (num_tokens == 0) throw InvalidArgument("the prompt is empty; give at least one token");
  if (num_tokens + num_new_tokens > config_.max_model_len) {
    throw InvalidArgument(concat(
        "the prompt has ", num_tokens, " tokens, but max_model_len=", config_.max_model_len,
        " leaves room for ", config_.max_model_len - num_new_tokens,
        num_new_tokens > 0 ? " and one to generate" : "", "; shorten it or raise max_model_len"));
  }
}

void RequestAdmission::check_adapter(const Request& request) const {
  if (!request.adapter) return;
  const AdapterRef& adapter = *request.adapter;
  if (!limits_.has_adapters) {
    throw NotSupported(concat("adapter '", adapter.name,
                              "': this engine runs a model's own weights; merge the adapter into "
                              "the checkpoint and load that"));
  }
  if (adapter.index < 0)
    throw InvalidArgument(concat("adapter '", adapter.name, "' is not loaded; load it first"));
}

// What is handed over are the blocks of one sequence of token ids.
void RequestAdmission::check_hand_over(const Request& request) const {
  if (!request.receive_from && !request.send_to) return;
  const char* const field = request.receive_from ? "receive_from" : "send_to";
  if (!limits_.has_peers) {
    throw NotSupported(concat(field,
                              ": this engine has no peers to exchange KV blocks with; leave "
                              "it out, and the prompt is computed here"));
  }
  if (kv_cache_.has_states()) {
    throw NotSupported(concat(field,
                              ": the states of this model's layers are not handed over; "
                              "leave it out, and the prompt is computed here"));
  }
  if (request.params.n != 1 || request.beam_search || request.pooling || request.prompt_embeds ||
      request.params.prompt_logprobs) {
    throw InvalidArgument(concat(field,
                                 ": one sequence of token ids is handed over: n must be 1, "
                                 "without beam search, pooling, prompt_embeds and "
                                 "prompt_logprobs"));
  }
}

// The end-of-sequence ids are banned before min_tokens, and only the config knows them.
void RequestAdmission::check_can_go_on(const SamplingParams& params) const {
  if (!params.allowed_token_ids || params.min_tokens == 0) return;
  const std::vector<int32_t> banned = stop_token_ids(config_, params);
  if (std::ranges::all_of(*params.allowed_token_ids,
                          [&](int32_t id) { return std::ranges::binary_search(banned, id); })) {
    throw InvalidArgument(concat("allowed_token_ids holds nothing but tokens that end the text, ",
                                 "which min_tokens=", params.min_tokens,
                                 " rules out; allow others or set min_tokens=0"));
  }
}

// What has been generated so far is one sequence's, and has not reached its end.
void RequestAdmission::check_resumed(const Request& request) const {
  const int64_t num_resumed = std::ssize(request.resumed_token_ids);
  if (num_resumed == 0) return;
  if (request.params.n != 1 || request.beam_search || request.pooling ||
      request.params.prompt_logprobs) {
    throw InvalidArgument(
        "resumed_token_ids go on with one sequence: n must be 1, without beam search, pooling and "
        "prompt_logprobs");
  }
  const int64_t num_left =
      std::min<int64_t>(request.params.max_tokens,
                        config_.max_model_len - std::ssize(request.prompt_token_ids)) -
      num_resumed;
  if (num_left <= 0) {
    throw InvalidArgument(concat("resumed_token_ids has ", num_resumed,
                                 " tokens, which max_tokens=", request.params.max_tokens,
                                 " and max_model_len=", config_.max_model_len,
                                 " leave nothing to go on with"));
  }
  if (limits_.vocab_size < 0) return;
  for (const int32_t id : request.resumed_token_ids) {
    if (id < 0 || id >= limits_.vocab_size) {
      throw InvalidArgument(concat("resumed token id ", id, " is outside the vocabulary [0, ",
                                   limits_.vocab_size, ")"));
    }
  }
}

std::string RequestAdmission::pool_arithmetic(int64_t num_tokens) const {
  return concat("needs ", kv_cache_.num_blocks_for(num_tokens), " blocks (", num_tokens,
                " tokens, block_size=", kv_cache_.block_size(), "), but the KV pool has ",
                kv_cache_.num_blocks(), " (",
                int64_t{kv_cache_.num_blocks()} * kv_cache_.block_size(), " tokens)");
}

std::string RequestAdmission::outgrown_error(int64_t num_tokens) const {
  return concat("the sequence ", pool_arithmetic(num_tokens),
                "; raise num_blocks or lower max_tokens");
}

}  // namespace llmserve
