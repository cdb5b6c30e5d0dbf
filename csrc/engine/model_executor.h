// A model on a backend: builds the flat batch, runs the layers, computes the logits that are
// wanted, draws the tokens.
#pragma once

#include <memory>
#include <vector>

#include "api/engine_config.h"
#include "core/arena.h"
#include "engine/batch_builder.h"
#include "engine/executor.h"
#include "engine/kv_storage.h"
#include "engine/mask_filler.h"
#include "engine/pooler.h"
#include "models/model.h"
#include "sampling/sampler.h"

namespace llmserve {

// Logits are computed for at most this many rows at a time: enough that the head's weights are read
// once for many rows, and a bound on the largest buffer of the step (64 rows of a 152k vocabulary
// are 39 MB).
inline constexpr int64_t kMaxLogitRowsAtOnce = 64;

// What packed weights depend on beside the checkpoint; PackedKey.
std::string packed_variant(const EngineConfig& config, const Backend& backend);

class ModelExecutor final : public Executor {
 public:
  // Loads the checkpoint. Throws what open_checkpoint, read_model_config and load_model throw.
  explicit ModelExecutor(const EngineConfig& config);

  void launch(const StepPlan& plan) override;
  const SampledTokens& wait() override { return sampled_; }
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
    masks_->forget(request_id, sample_index);
  }
  void check_idle() const override;
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t hidden_size() const override { return hidden_size_; }
  std::string description() const override;
  MemoryUse memory_use() const override;
  std::string warning() const override { return warning_; }
  void release(MemoryPart part) override;
  void restore(MemoryPart part) override;

 private:
  std::unique_ptr<Model> load();
  void load_weights();
  void check_shapes(const Model& model) const;
  void sample_rows(const ForwardContext& context, const Tensor& hidden, const StepBatch& batch);

  const EngineConfig config_;
  const std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;           // null while the weights are given back
  std::string warning_;                    // of the last load
  std::unique_ptr<Arena> arena_;           // likewise
  std::unique_ptr<KvStorage> kv_storage_;  // null while the KV cache is
  // Of the model as it was first loaded.
  int64_t vocab_size_ = 0;
  int64_t hidden_size_ = 0;
  int64_t workspace_bytes_ = 0;
  int64_t scratch_bytes_ = 0;  // that the backend reserved for it, and keeps
  std::vector<KvLayerSpec> kv_layers_;
  BatchBuilder batch_builder_;
  std::unique_ptr<MaskFiller> masks_;
  Sampler sampler_;
  Pooler pooler_;
  SampledTokens sampled_;
};

}  // namespace llmserve
