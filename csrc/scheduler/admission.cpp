#include "scheduler/admission.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"

namespace llmserve {
namespace {

// What gives more blocks, for who reads that there are too few.
constexpr std::string_view kPoolSize = "kv_cache_memory_bytes (num_blocks of a Scheduler)";

}  // namespace

std::vector<int32_t> stop_token_ids(const SchedulerConfig& config, const SamplingParams& params) {
  std::vector<int32_t> ids = params.stop_token_ids;
  if (!params.ignore_eos) {
    ids.insert(ids.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

std::string PlaceInCall::prompt() const {
  return num_requests > 1 ? concat("prompts[", index, "]") : "prompt";
}

std::string PlaceInCall::params(const Request& request) const {
  if (num_requests == 0) return "";
  if (request.beam_search) return "params: ";  // one for all prompts of a call
  return concat(request.pooling ? "pooling_params[" : "sampling_params[", index, "]: ");
}

void RequestAdmission::check(const Request& request, const PlaceInCall& place) const {
  try {
    check_params(request);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(place.params(request), error.what()));
  }
  check_adapter(request);
  check_hand_over(request);
  check_prompt(request, place);
  check_resumed(request);
  check_memory(request, place);
}

void RequestAdmission::admit(Request& request, const PlaceInCall& place) const {
  check(request, place);
  std::optional<int32_t>& prompt_logprobs = request.params.prompt_logprobs;
  if (prompt_logprobs == -1 && limits_.vocab_size >= 0)
    prompt_logprobs = static_cast<int32_t>(limits_.vocab_size);
  if (takes_embeds(request)) {
    request.prompt_token_ids.assign(static_cast<size_t>(request.prompt_embeds->num_rows),
                                    kNoTokenId);
  }
}

// Where the model's sizes are not known, a prompt of embeddings brings its stand-ins along.
bool RequestAdmission::takes_embeds(const Request& request) const {
  return request.prompt_embeds && limits_.hidden_size >= 0;
}

int64_t RequestAdmission::num_prompt_tokens(const Request& request) const {
  return takes_embeds(request) ? request.prompt_embeds->num_rows
                               : std::ssize(request.prompt_token_ids);
}

void RequestAdmission::check_params(const Request& request) const {
  const SamplingParams& params = request.params;
  if (vocabulary_ == nullptr && !params.stop.empty()) {
    throw InvalidArgument(
        "stop strings need a tokenizer, and this engine has no tokenizer; use stop_token_ids");
  }
  params.validate();
  if (limits_.vocab_size >= 0) params.validate_token_ids(limits_.vocab_size);
  check_logprobs(params);
  if (limits_.must_make_text && params.detokenize && vocabulary_ == nullptr) {
    throw InvalidArgument("this engine has no tokenizer: pass detokenize=False and read token_ids");
  }
  if (request.beam_search) request.beam_search->validate();
  if (request.pooling) {
    request.pooling->validate();
    if (limits_.hidden_size >= 0) request.pooling->validate_dimensions(limits_.hidden_size);
  }
  if ((request.beam_search || request.pooling) && params.n != 1)
    throw InvalidArgument(concat("n must be 1 for beam search and pooling, got ", params.n));
  check_can_go_on(params);
}

void RequestAdmission::check_logprobs(const SamplingParams& params) const {
  if (limits_.max_logprobs < 0) return;
  const auto check = [&](const char* field, const std::optional<int32_t>& value) {
    const int64_t count = value == -1 ? limits_.vocab_size : value.value_or(0);
    if (count <= limits_.max_logprobs) return;
    throw InvalidArgument(concat(field, "=", *value, " asks for ", count,
                                 " a token, more than max_logprobs=", limits_.max_logprobs,
                                 "; raise max_logprobs of the engine, -1 for no bound"));
  };
  check("logprobs", params.logprobs);
  check("prompt_logprobs", params.prompt_logprobs);
}

void RequestAdmission::check_prompt(const Request& request, const PlaceInCall& place) const {
  if (takes_embeds(request)) check_embeds(request, place);
  check_length(request, place);
  check_ids(request, place);
}

void RequestAdmission::check_embeds(const Request& request, const PlaceInCall& place) const {
  const HostArray& embeds = *request.prompt_embeds;
  if (!request.prompt_token_ids.empty()) {
    throw InvalidArgument(
        concat(place.prompt(), " has 'prompt_token_ids' and 'prompt_embeds'; give one"));
  }
  if (embeds.width != limits_.hidden_size) {
    throw InvalidArgument(concat(place.prompt(), "['prompt_embeds'] must have the model's hidden ",
                                 "size ", limits_.hidden_size,
                                 " as its last dimension, got shape (", embeds.num_rows, ", ",
                                 embeds.width, ")"));
  }
  if (request.params.prompt_logprobs) {
    throw InvalidArgument(concat(place.params(request),
                                 "prompt_logprobs are of token ids, and prompt_embeds have none"));
  }
}

void RequestAdmission::check_length(const Request& request, const PlaceInCall& place) const {
  const int64_t num_tokens = num_prompt_tokens(request);
  const int64_t num_new_tokens = request.pooling ? 0 : 1;  // at least
  if (num_tokens == 0)
    throw InvalidArgument(concat(place.prompt(), " is empty; a prompt has at least one token"));
  if (num_tokens + num_new_tokens > config_.max_model_len) {
    throw PromptTooLong(concat(
        place.prompt(), " has ", num_tokens, " tokens, but max_model_len=", config_.max_model_len,
        " has to hold the prompt", num_new_tokens > 0 ? " and at least one new token" : "",
        "; shorten it or raise max_model_len"));
  }
}

void RequestAdmission::check_ids(const Request& request, const PlaceInCall& place) const {
  if (limits_.vocab_size < 0) return;
  const std::vector<int32_t>& ids = request.prompt_token_ids;
  const auto bad =
      std::ranges::find_if(ids, [&](int32_t id) { return id < 0 || id >= limits_.vocab_size; });
  if (bad == ids.end()) return;
  // Tokenizers may have tokens that the model has no embeddings for.
  const std::string_view text = vocabulary_ ? vocabulary_->bytes(*bad) : std::string_view();
  const std::string name = text.empty() ? "" : concat(" ('", text, "')");
  throw InvalidArgument(concat(place.prompt(), "[", bad - ids.begin(), "] is token id ", *bad, name,
                               ", outside the model's vocabulary (0 to ", limits_.vocab_size - 1,
                               ")"));
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
  const int64_t num_left = std::min<int64_t>(request.params.max_tokens,
                                             config_.max_model_len - num_prompt_tokens(request)) -
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

void RequestAdmission::check_memory(const Request& request, const PlaceInCall& place) const {
  const int64_t num_prompt = num_prompt_tokens(request);
  const int64_t num_new_tokens = request.pooling ? 0 : 1;
  const int64_t num_tokens = num_prompt + std::ssize(request.resumed_token_ids) + num_new_tokens;
  if (outgrows_pool(num_tokens)) {
    throw ResourceExhausted(concat(place.prompt(), " ", pool_arithmetic(num_tokens), "; raise ",
                                   kPoolSize, " or shorten the prompt"));
  }
  if (!request.pooling || limits_.hidden_size < 0) return;
  const PooledShape shape =
      pooled_shape(*request.pooling, num_prompt, limits_.hidden_size, limits_.vocab_size);
  if (shape.bytes() > kMaxPooledBytes) {
    throw ResourceExhausted(concat(place.prompt(), ": task ", name(request.pooling->task), " of ",
                                   num_prompt, " tokens gives ", shape.num_rows, " x ", shape.width,
                                   " float32 = ", shape.bytes(), " bytes, and the limit is ",
                                   kMaxPooledBytes, "; pass at most ",
                                   kMaxPooledBytes / 4 / shape.width, " tokens"));
  }
}

std::string RequestAdmission::pool_arithmetic(int64_t num_tokens) const {
  return concat("needs ", kv_cache_.num_blocks_for(num_tokens), " blocks (", num_tokens,
                " tokens, block_size=", kv_cache_.block_size(), "), but the KV pool has ",
                kv_cache_.num_blocks(), " (",
                int64_t{kv_cache_.num_blocks()} * kv_cache_.block_size(), " tokens)");
}

std::string RequestAdmission::outgrown_error(int64_t num_tokens) const {
  return concat("the sequence ", pool_arithmetic(num_tokens), "; raise ", kPoolSize,
                " or lower max_tokens");
}

}  // namespace llmserve
