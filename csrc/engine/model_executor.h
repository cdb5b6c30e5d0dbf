// A model on a backend: builds the flat batch, runs the layers, computes the logits that are
// wanted, draws the tokens.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "api/engine_config.h"
#include "core/arena.h"
#include "engine/batch_builder.h"
#include "engine/executor.h"
#include "engine/kv_storage.h"
#include "engine/mask_filler.h"
#include "engine/pooler.h"
#include "engine/recorded_shape.h"
#include "models/model.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"

namespace llmserve {

// Logits are computed for at most this many rows at a time: enough that the head's weights are read
// once for many rows, and a bound on the largest buffer of the step (64 rows of a 152k vocabulary
// are 39 MB).
inline constexpr int64_t kMaxLogitRowsAtOnce = 64;

// The largest that these settings allow.
StepShape largest_step(const ModelConfig& model, const WeightReport& weights,
                       const EngineConfig& config);

// What packed weights depend on beside the checkpoint; PackedKey.
std::string packed_variant(const EngineConfig& config, const Backend& backend);

class ModelExecutor final : public Executor {
 public:
  // Loads the checkpoint. Throws what open_checkpoint, read_model_config and load_model throw.
  explicit ModelExecutor(const EngineConfig& config);

  int32_t max_in_flight() const override {
    return steps_ != nullptr && config_.async_scheduling ? Scheduler::kMaxInFlight : 1;
  }
  void launch(const StepPlan& plan) override;
  const SampledTokens& wait() override;
  void abandon() noexcept override;
  // Packs a weight.
  bool do_chore() override;
  bool do_idle_chore() override;
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
    masks_->forget(request_id, sample_index);
  }
  void check_idle() const override;
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t hidden_size() const override { return hidden_size_; }
  std::string description() const override;
  MemoryUse memory_use() const override;
  void fill_metrics(EngineMetrics& metrics) const override;
  std::string warning() const override { return warning_; }
  void release(MemoryPart part) override;
  void restore(MemoryPart part) override;

 private:
  std::unique_ptr<Model> load();
  void load_weights();
  void check_shapes(const Model& model) const;
  // Where there is a device, the tokens come with the step's results; otherwise they are there.
  struct Flight {
    int64_t step = 0;  // of DeviceSteps
    SampledTokens sampled;
    size_t num_rows = 0;               // S
    std::vector<bool> only_draws;      // [S] of those that do, nothing follows is set
    std::vector<Filing> filings;       // [at least S]
    std::vector<SampledRow> answered;  // likewise
  };

  StepBatch& build(const StepPlan& plan, const BatchShape& shape);
  void run(const StepPlan& plan, const StepBatch& batch, MaskFiller::Pending& masks,
           Flight& flight);
  void run_recorded(const StepBatch& batch);
  void sample_rows(const ForwardContext& context, const Tensor& hidden, const StepBatch& batch,
                   Flight& flight);
  void draw_rows(const Tensor& logits, const StepBatch& batch, size_t begin, Flight& flight);
  void sample_on_device(const Tensor& logits, const StepBatch& batch, size_t begin, Flight& flight);

  const EngineConfig config_;
  const std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;           // null while the weights are given back
  std::vector<DeferredWeight> deferred_;   // of the model, the next to be packed at the back
  std::string warning_;                    // of the last load
  std::unique_ptr<Arena> arena_;           // likewise
  std::unique_ptr<KvStorage> kv_storage_;  // null while the KV cache is
  int64_t num_used_blocks_ = 0;            // of it: behind them none was ever written to
  // Of the model as it was first loaded.
  int64_t vocab_size_ = 0;
  int64_t hidden_size_ = 0;
  int64_t workspace_bytes_ = 0;
  int64_t scratch_bytes_ = 0;  // that the backend reserved for it, and keeps
  std::vector<KvLayerSpec> kv_layers_;
  DeviceSteps* const steps_;  // the backend's, or null
  const RecordingLimits limits_;
  BatchBuilder batch_builder_;
  std::vector<std::byte> block_;      // a batch's integers, where there is no device
  std::vector<int32_t> late_tokens_;  // of the rows at hand
  std::unique_ptr<MaskFiller> masks_;
  Sampler sampler_;
  Pooler pooler_;
  std::array<Flight, Scheduler::kMaxInFlight> flights_;
  int32_t oldest_flight_ = 0;
  int32_t num_in_flight_ = 0;
  SampledTokens sampled_;  // that wait() gave last
};

}  // namespace llmserve
