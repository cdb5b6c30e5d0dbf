#include "engine/worker_plan.h"

#include <algorithm>

#include "core/error.h"
#include "engine/batch_builder.h"
#include "io/quantization_files.h"
#include "models/model_loader.h"

namespace llmserve {

TensorRank tensor_rank(const EngineConfig& config, int rank) {
  return {.rank = rank % config.parallel.tensor,
          .size = config.parallel.tensor,
          .has_whole_experts = config.parallel.has_whole_experts};
}

ThreadShare thread_share(const EngineConfig& config, int rank) {
  const int32_t workers = config.parallel.num_workers();
  const int32_t worker = config.parallel.replica * config.parallel.num_ranks() + rank;
  const int32_t threads = std::max(config.num_threads, workers);
  const int32_t extra = threads % workers;
  return {.first = threads / workers * worker + std::min(worker, extra),
          .count = threads / workers + (worker < extra ? 1 : 0)};
}

StepShape largest_step(const ModelConfig& model, const WeightReport& weights,
                       const EngineConfig& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  const int64_t block_size = config.cache.block_size;
  const int64_t max_blocks = (scheduler.max_model_len + block_size - 1) / block_size;
  StepShape shape = step_shape(model, weights, scheduler.max_num_batched_tokens);
  shape.weight_dtype = config.dtype;
  shape.cache_dtype = config.kv_cache_dtype;
  shape.max_sequences = scheduler.max_num_seqs;
  shape.max_context = max_blocks * block_size;
  shape.max_logit_rows = kMaxLogitRowsAtOnce;
  // Each token may have logits: those of prompts are asked for, too.
  shape.block_bytes = BatchBuilder(block_size, row_groups(config.cache.groups).size())
                          .num_bytes({.num_tokens = shape.max_tokens,
                                      .num_sequences = shape.max_sequences,
                                      .num_rows = shape.max_tokens,
                                      .max_blocks = max_blocks});
  return shape;
}

int64_t layer_state_bytes(const ModelConfig& model, const EngineConfig& config) {
  return int64_t{config.max_wanted_layers} * config.scheduler.max_num_batched_tokens *
         model.hidden_size * static_cast<int64_t>(sizeof(float));
}

void add_bytes(const WeightReport& rank, WeightReport& sum) {
  for (size_t i = 0; i < sum.group_bytes.size(); ++i) sum.group_bytes[i] += rank.group_bytes[i];
  sum.mapped_bytes += rank.mapped_bytes;
}

void check_kv_rows(DType dtype, const CacheGroupSpec& rows) {
  if (dtype != DType::kF8E4M3) return;
  if (rows.key_dim % 4 != 0 || rows.value_dim % 4 != 0)
    throw NotSupported(
        concat("kv_cache_dtype 'fp8' takes heads of a multiple of 4 elements, and this model has "
               "keys of ",
               rows.key_dim, " and values of ", rows.value_dim, "; use kv_cache_dtype='auto'"));
}

std::string packed_variant(const EngineConfig& config, const Backend& backend,
                           const Checkpoint& checkpoint, int rank) {
  constexpr size_t kShown = 16;  // digits of the digest
  const auto& quantization = checkpoint.quantization();
  return concat(
      quantization ? concat("read by ", digest(*quantization).substr(0, kShown), " ") : "",
      config.quantization.empty() ? "" : config.quantization + " of ", name(config.dtype), " in ",
      backend.packed_layout(),
      config.parallel.tensor == 1
          ? ""
          : concat(", rank ", rank, " of ", config.parallel.tensor,
                   config.parallel.has_whole_experts ? ", experts whole" : ""));
}

}  // namespace llmserve
