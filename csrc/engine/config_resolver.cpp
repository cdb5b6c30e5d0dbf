#include "engine/config_resolver.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/system.h"
#include "kernels/backend_choice.h"
#include "models/model_loader.h"
#include "speculation/registry.h"

namespace llmserve {
namespace {

// Tokens a step. On a CPU a GEMM is at full speed from a few hundred rows on, and a longer step
// only makes running sequences wait longer for their next token.
constexpr int32_t kDefaultMaxNumBatchedTokens = 512;
constexpr int32_t kDefaultMaxNumSeqs = 256;
// Rows with which a CPU multiplies about as fast as with many, while it reads the weights.
constexpr int32_t kMinSpreadTokens = 64;

// A step must have room for one token of each running sequence, so one setting bounds the default
// of the other.
void resolve_batch(const ConfigRequest& request, SchedulerConfig& scheduler) {
  scheduler.max_num_seqs = request.max_num_seqs.value_or(
      std::min(kDefaultMaxNumSeqs, request.max_num_batched_tokens.value_or(kDefaultMaxNumSeqs)));
  const int64_t whole_prompt = scheduler.enable_chunked_prefill ? 1 : scheduler.max_model_len;
  scheduler.max_num_batched_tokens = request.max_num_batched_tokens.value_or(static_cast<int32_t>(
      std::max<int64_t>({kDefaultMaxNumBatchedTokens, scheduler.max_num_seqs, whole_prompt})));
}

}  // namespace

int64_t check_max_model_len(const std::optional<int64_t>& max_model_len) {
  if (max_model_len && *max_model_len < 1) {
    throw InvalidArgument(concat("max_model_len must be positive, got ", *max_model_len));
  }
  return max_model_len.value_or(0);
}

EngineConfig resolve_settings(const ConfigRequest& request, const Checkpoint& checkpoint,
                              const ModelConfig& model) {
  EngineConfig config = request.settings;
  config.model_path = request.model;
  config.device = resolve_backend(request.device);
  config.dtype = resolve_dtype(request.dtype, checkpoint);
  resolve_weight_format(config.dtype, config.quantization);  // or its errors
  config.kv_cache_dtype = kv_cache_dtype_from_name(request.kv_cache_dtype, config.dtype);
  config.num_threads =
      std::max(request.num_threads.value_or(default_num_threads()), config.parallel.num_workers());
  SchedulerConfig& scheduler = config.scheduler;
  scheduler.max_model_len = model.max_model_len;
  if (scheduler.eos_token_ids.empty()) scheduler.eos_token_ids = model.eos_token_ids;
  const bool can_spread = scheduler.enable_chunked_prefill && config.device == "cpu";
  if (request.spreads_prompts && can_spread && scheduler.min_spread_tokens == 0)
    scheduler.min_spread_tokens = kMinSpreadTokens;
  resolve_batch(request, scheduler);
  if (config.speculation.is_on()) find_drafter(config.speculation.method);  // or its error
  config.cache.num_blocks = 1;  // so that the rest is checked before the plan is made from it
  config.validate();
  return config;
}

}  // namespace llmserve
