// A head beside its target: the target's states that it still needs, and its draws. Its ranks
// compute, on the target's threads. The drafter (speculation/head_drafter.h) says what it runs.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "engine/draft_choices.h"
#include "engine/head_rank.h"
#include "engine/mask_filler.h"
#include "engine/worker.h"
#include "io/bus_errors.h"
#include "sampling/sampler.h"
#include "speculation/head_model.h"

namespace llmserve {

// Tokens whose states are kept at most: of the largest step, and the newest of each sequence.
int64_t num_kept_states(const EngineConfig& config);
// Of those states.
int64_t kept_state_bytes(const HeadConfig& head, const EngineConfig& config);

class HeadWorker final : public HeadModel {
 public:
  // What it computes beside: a worker each rank, and how work goes on all ranks' threads, where it
  // may exchange.
  struct Target {
    std::vector<const Worker*> workers;
    std::function<void(const std::function<void(int rank)>& work)> run_on_ranks;
    MaskFiller& masks;
  };
  // Loads the head of config.model_path for `target`, which outlives it. Throws what
  // read_head_config and loading throw.
  HeadWorker(HeadKind kind, const EngineConfig& config, Target target);

  const CacheConfig& cache() const override { return config_.cache; }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_step_rows() const override { return config_.scheduler.max_num_batched_tokens; }
  int32_t max_guesses() const override { return head().max_guesses(); }
  int32_t num_layers() const override { return static_cast<int32_t>(head().num_layers()); }
  std::vector<int32_t> wanted_layers() const override { return wanted_layers_; }
  int64_t num_kept() const override { return num_kept_states(config_); }
  void keep(const Tensor& states, std::span<const int32_t> kept) override;
  const SampledTokens& run(HeadStep& step) override;
  std::span<const DraftChoice> choices(size_t row) const override { return choices_.of(row); }
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
  }

  // [S, D] of the last run, for tests; it runs at most kMaxLogitRowsAtOnce rows then.
  const std::vector<float>& last_logits() const { return logits_; }
  void keep_logits() { keeps_logits_ = true; }

  MemoryUse memory_use() const;
  void release(MemoryPart part);
  void restore(MemoryPart part);

 private:
  HeadRank& first() const { return *ranks_[0]; }
  const HeadConfig& head() const { return first().head().config(); }
  Backend& backend() const { return target_.workers[0]->backend(); }
  Checkpoint open() const;
  void load();
  void check_files() const;
  void lay_out(const HeadStep& step);
  void draw(const ConstTensor& logits, const HeadStep& step, size_t begin);

  const HeadKind kind_;
  const EngineConfig config_;
  const Target target_;
  std::vector<std::unique_ptr<HeadRank>> ranks_;
  // Of the files that its weights came from, of which some are read in place.
  std::vector<std::shared_ptr<const ReadState>> files_;
  std::vector<int32_t> wanted_layers_;  // increasing, each once
  std::vector<int64_t> state_places_;   // of the head's layers among them
  Buffer kept_;                         // [num_kept, head's layers, E of the target] f32
  bool is_in_order_ = false;            // they are 0, 1, 2 …
  std::vector<int64_t> kept_slots_;     // [head's layers, T] of rows in it
  Sampler sampler_;
  SampledTokens sampled_;
  DraftChoices choices_;
  bool keeps_logits_ = false;
  std::vector<float> logits_;
  // A step's arrays.
  std::vector<int32_t> query_starts_;
  std::vector<int32_t> kv_lens_;
  std::vector<int32_t> block_tables_;
  std::vector<int64_t> slots_;
  std::vector<KvGroupInput> kv_groups_;
  std::vector<std::pair<int32_t, int32_t>> copies_;
  std::vector<float> no_embedding_;  // [H] zeros, or none
  std::vector<GivenRows> given_;
  ModelInput input_;
};

}  // namespace llmserve
