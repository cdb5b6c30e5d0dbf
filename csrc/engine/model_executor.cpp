#include "engine/model_executor.h"

#include <algorithm>

#include "core/error.h"
#include "io/checkpoint.h"

namespace llmserve {
namespace {

std::unique_ptr<Model> load(const EngineConfig& config, Backend& backend) {
  const Checkpoint checkpoint = open_checkpoint(config.model_path);
  const ModelConfig model_config =
      read_model_config(checkpoint.config(), config.scheduler.max_model_len);
  return load_model(checkpoint, model_config, backend, config.dtype);
}

}  // namespace

ModelExecutor::ModelExecutor(const EngineConfig& config)
    : dtype_(config.dtype),
      backend_(make_backend(config.device, {.num_threads = config.num_threads})),
      model_(load(config, *backend_)),
      arena_(model_->workspace_bytes(config.scheduler.max_num_batched_tokens, kMaxLogitRowsAtOnce),
             backend_->memory()),
      kv_storage_(model_->kv_layers(), config.cache.num_blocks, config.cache.block_size,
                  config.kv_cache_dtype, backend_->memory()),
      batch_builder_(config.cache.block_size),
      sampler_(*backend_) {}

const SampledTokens& ModelExecutor::execute(const StepPlan& plan) {
  const StepBatch& batch = batch_builder_.build(plan);
  kv_storage_.copy_blocks(*backend_, batch.copies);
  const Arena::Scope scope(arena_);
  const ForwardContext context{*backend_, arena_, batch.input, kv_storage_.layers()};
  const Tensor hidden = model_->forward(context);
  sample_rows(context, hidden, batch);
  return sampled_;
}

void ModelExecutor::sample_rows(const ForwardContext& context, const Tensor& hidden,
                                const StepBatch& batch) {
  sampled_.clear();
  const std::span<const int32_t> tokens = batch.input.logit_rows;
  const std::span<const SampleRow> rows = batch.sample_rows;
  for (size_t begin = 0; begin < tokens.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, tokens.size() - begin);
    const Arena::Scope scope(arena_);
    const Tensor logits = model_->compute_logits(context, hidden, tokens.subspan(begin, count));
    sampler_.sample(logits, rows.subspan(begin, count), sampled_);
  }
}

std::string ModelExecutor::description() const {
  return concat(model_->config().architecture, " ", name(dtype_), " on ", backend_->description());
}

MemoryUse ModelExecutor::memory_use() const {
  return {.weight_bytes = model_->weights().total_bytes(),
          .workspace_bytes = arena_.capacity_bytes(),
          .kv_cache_bytes = kv_storage_.num_bytes()};
}

}  // namespace llmserve
