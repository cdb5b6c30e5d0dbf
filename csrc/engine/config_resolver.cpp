#include "engine/config_resolver.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/system.h"
#include "engine/model_executor.h"
#include "io/checkpoint.h"
#include "models/model.h"

namespace llmserve {
namespace {

// Tokens a step. On a CPU a GEMM is at full speed from a few hundred rows on, and a longer step
// only makes running sequences wait longer for their next token.
constexpr int32_t kDefaultMaxNumBatchedTokens = 512;
constexpr int32_t kDefaultMaxNumSeqs = 256;

DType resolve_kv_dtype(const std::string& requested, DType dtype) {
  if (requested == "auto") return dtype;
  for (const DType candidate : {DType::kF32, DType::kBF16}) {
    if (requested == name(candidate)) return candidate;
  }
  throw NotSupported("kv_cache_dtype must be auto, float32 or bfloat16, got " + requested);
}

// A step must have room for one token of each running sequence, so one setting bounds the default
// of the other.
void resolve_batch(const ConfigRequest& request, SchedulerConfig& scheduler) {
  scheduler.max_num_seqs = request.max_num_seqs.value_or(
      std::min(kDefaultMaxNumSeqs, request.max_num_batched_tokens.value_or(kDefaultMaxNumSeqs)));
  const int64_t whole_prompt = request.enable_chunked_prefill ? 1 : scheduler.max_model_len;
  scheduler.max_num_batched_tokens = request.max_num_batched_tokens.value_or(static_cast<int32_t>(
      std::max<int64_t>({kDefaultMaxNumBatchedTokens, scheduler.max_num_seqs, whole_prompt})));
}

double resolve_utilization(const ConfigRequest& request) {
  const double share = request.memory_utilization.value_or(kDefaultCpuMemoryUtilization);
  if (!(share > 0 && share <= 1)) {
    throw InvalidArgument(concat("gpu_memory_utilization must be in (0, 1], got ", share));
  }
  return share;
}

// Bytes for the KV pool when neither the user nor a number of blocks says how many.
int64_t default_kv_bytes(const ConfigRequest& request, const ModelPlan& plan, const Memory& memory,
                         int64_t useful_bytes) {
  const double share = resolve_utilization(request);
  const int64_t available = memory.available_bytes();
  const int64_t left = static_cast<int64_t>(share * static_cast<double>(available)) -
                       plan.weights.total_bytes() - plan.workspace_bytes;
  if (left <= 0) {
    throw ResourceExhausted(
        concat("the model needs ", plan.weights.total_bytes(), " bytes of weights and ",
               plan.workspace_bytes, " of workspace, and ", share, " of the ", available,
               " bytes available is less; free memory or raise gpu_memory_utilization"));
  }
  return std::min(left, useful_bytes);
}

int64_t resolve_num_blocks(const ConfigRequest& request, const ModelPlan& plan,
                           const Memory& memory, const SchedulerConfig& scheduler) {
  const int64_t block_bytes = plan.kv_bytes_per_token * request.block_size;
  const int64_t blocks_per_sequence =
      (scheduler.max_model_len + request.block_size - 1) / request.block_size;
  int64_t num_blocks = 0;
  if (request.num_blocks) {
    num_blocks = *request.num_blocks;
  } else if (request.kv_cache_memory_bytes) {
    num_blocks = *request.kv_cache_memory_bytes / block_bytes;
  } else {
    num_blocks = default_kv_bytes(request, plan, memory,
                                  scheduler.max_num_seqs * blocks_per_sequence * block_bytes) /
                 block_bytes;
  }
  if (num_blocks < blocks_per_sequence) {
    throw ResourceExhausted(
        concat("a sequence of max_model_len=", scheduler.max_model_len, " tokens needs ",
               blocks_per_sequence * block_bytes, " bytes of KV cache (", plan.kv_bytes_per_token,
               " a token), and the pool has ", num_blocks * block_bytes,
               "; pass kv_cache_memory_bytes=", blocks_per_sequence * block_bytes,
               " or more, or max_model_len=", num_blocks * request.block_size, " or less"));
  }
  return num_blocks;
}

}  // namespace

EngineConfig resolve_config(const ConfigRequest& request) {
  const Checkpoint checkpoint = open_checkpoint(request.model);
  if (request.max_model_len && *request.max_model_len < 1) {
    throw InvalidArgument(concat("max_model_len must be positive, got ", *request.max_model_len));
  }
  const ModelConfig model =
      read_model_config(checkpoint.config(), request.max_model_len.value_or(0));
  EngineConfig config;
  config.model_path = request.model;
  config.device = request.device == "auto" ? "cpu" : request.device;
  config.dtype = resolve_dtype(request.dtype, checkpoint);
  config.kv_cache_dtype = resolve_kv_dtype(request.kv_cache_dtype, config.dtype);
  config.num_threads = request.num_threads.value_or(default_num_threads());
  config.seed = request.seed;
  config.max_logprobs = request.max_logprobs;
  config.scheduler.policy = request.policy;
  config.scheduler.max_model_len = model.max_model_len;
  config.scheduler.max_num_queued_reqs = request.max_num_queued_reqs.value_or(0);
  config.scheduler.enable_chunked_prefill = request.enable_chunked_prefill;
  config.scheduler.eos_token_ids =
      request.eos_token_ids.empty() ? model.eos_token_ids : request.eos_token_ids;
  resolve_batch(request, config.scheduler);
  config.cache.block_size = request.block_size;
  config.cache.enable_prefix_caching = request.enable_prefix_caching;
  config.cache.num_blocks = 1;  // so that the rest is checked before the plan is made from it
  config.validate();

  const std::unique_ptr<Backend> backend = make_backend(config.device, {.num_threads = 1});
  const ModelPlan plan = plan_model(checkpoint, model, *backend,
                                    {.dtype = config.dtype,
                                     .kv_cache_dtype = config.kv_cache_dtype,
                                     .max_tokens = config.scheduler.max_num_batched_tokens,
                                     .max_logit_rows = kMaxLogitRowsAtOnce});
  config.cache.num_blocks = static_cast<int32_t>(
      std::min<int64_t>(resolve_num_blocks(request, plan, backend->memory(), config.scheduler),
                        INT32_MAX / request.block_size));
  return config;
}

}  // namespace llmserve
