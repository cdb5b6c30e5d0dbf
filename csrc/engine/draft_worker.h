// A draft model beside the target: its weights, its KV cache and its draws, on the target's
// threads. The drafter (speculation/model_drafter.h) says what it runs.
#pragma once

#include <memory>
#include <vector>

#include "api/engine_config.h"
#include "engine/batch_builder.h"
#include "engine/worker.h"
#include "sampling/sampler.h"
#include "speculation/draft_model.h"

namespace llmserve {

class DraftWorker final : public DraftModel {
 public:
  // Loads config.model_path, to compute on the target's backend. Throws what Worker's constructor
  // throws, and NotSupported on a device.
  DraftWorker(const EngineConfig& config, const std::shared_ptr<Backend>& backend);

  const CacheConfig& cache() const override { return config_.cache; }
  int64_t vocab_size() const override { return worker_.vocab_size(); }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_step_tokens() const override { return config_.scheduler.max_num_batched_tokens; }

  const SampledTokens& run(const StepPlan& plan, std::span<const DraftContext> contexts) override;
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
  }

  bool pack_weight() { return worker_.pack_weight(); }
  MemoryUse memory_use() const { return worker_.memory_use(); }
  void release(MemoryPart part) { worker_.release(part); }
  void restore(MemoryPart part) { worker_.restore(part); }

 private:
  class Draw;

  const EngineConfig config_;
  Worker worker_;
  BatchBuilder builder_;
  Sampler sampler_;
  std::vector<std::byte> block_;  // a batch's integers
  SampledTokens sampled_;
};

}  // namespace llmserve
