// A model on a backend: builds the flat batch, runs the layers, computes the logits that are
// wanted, draws the tokens.
#pragma once

#include <memory>

#include "api/engine_config.h"
#include "core/arena.h"
#include "engine/batch_builder.h"
#include "engine/executor.h"
#include "engine/kv_storage.h"
#include "models/model.h"
#include "sampling/sampler.h"

namespace llmserve {

// Logits are computed for at most this many rows at a time: enough that the head's weights are read
// once for many rows, and a bound on the largest buffer of the step (64 rows of a 152k vocabulary
// are 39 MB).
inline constexpr int64_t kMaxLogitRowsAtOnce = 64;

class ModelExecutor final : public Executor {
 public:
  // Loads the checkpoint. Throws what open_checkpoint, read_model_config and load_model throw.
  explicit ModelExecutor(const EngineConfig& config);

  const SampledTokens& execute(const StepPlan& plan) override;
  int64_t vocab_size() const override { return model_->config().vocab_size; }
  std::string description() const override;
  MemoryUse memory_use() const override;

 private:
  void sample_rows(const ForwardContext& context, const Tensor& hidden, const StepBatch& batch);

  const DType dtype_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<Model> model_;
  Arena arena_;
  KvStorage kv_storage_;
  BatchBuilder batch_builder_;
  Sampler sampler_;
  SampledTokens sampled_;
};

}  // namespace llmserve
