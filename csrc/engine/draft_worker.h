// A draft model beside the target: its weights, its KV cache and its draws, on the target's
// threads. The drafter (speculation/model_drafter.h) says what it runs.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "engine/batch_builder.h"
#include "engine/draft_choices.h"
#include "engine/mask_filler.h"
#include "engine/recorded_shape.h"
#include "engine/worker.h"
#include "sampling/sampler.h"
#include "speculation/draft_model.h"

namespace llmserve {

class DraftWorker final : public DraftModel {
 public:
  // Loads config.model_path, to compute on the backend of `target`, the first rank. `masks` are the
  // target's, and outlive it. is_exact: draws with the target's noise; otherwise with its own, and
  // keeps what it drew from. Throws what Worker's constructor throws.
  DraftWorker(const EngineConfig& config, const Worker& target, MaskFiller& masks, bool is_exact);

  const CacheConfig& cache() const override { return config_.cache; }
  int64_t vocab_size() const override { return worker_.vocab_size(); }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_step_tokens() const override { return config_.scheduler.max_num_batched_tokens; }

  const SampledTokens& run(const StepPlan& plan, std::span<const DraftContext> contexts) override;
  std::span<const DraftChoice> choices(size_t row) const override { return choices_.of(row); }
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
    guesses_.erase({request_id, sample_index});
  }
  // [V] that the newest guess of this position was drawn from; empty: it was certain, or the noise
  // was the target's.
  std::span<const float> drawn_from(RequestId request_id, int32_t sample_index,
                                    int64_t position) const;

  bool pack_weight() { return worker_.pack_weight(); }
  MemoryUse memory_use() const;
  void release(MemoryPart part) { worker_.release(part); }
  void restore(MemoryPart part) { worker_.restore(part); }

 private:
  class Draw;
  // Of a sequence's newest guesses.
  struct Guesses {
    int64_t first_position = 0;
    int64_t count = 0;
    std::vector<std::vector<float>> drawn_from;  // [at least count][V]
  };

  const SampledTokens& run_recorded(const StepPlan& plan, const RecordedShape& shape);
  std::vector<float>& begin_guess(const SampleTask& task);

  const EngineConfig config_;
  const int64_t target_scratch_bytes_;
  Worker worker_;
  BatchBuilder builder_;
  Sampler sampler_;
  MaskFiller& masks_;
  const bool is_exact_;
  std::map<std::pair<RequestId, int32_t>, Guesses> guesses_;  // by request and sample
  std::vector<std::byte> block_;                              // a batch's integers
  SampledTokens sampled_;
  DraftChoices choices_;  // of rows of which several are wanted
};

}  // namespace llmserve
