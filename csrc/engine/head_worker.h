// A head beside its target: its weights, its KV cache, the target's states that it still needs, and
// its draws, on the target's threads. The drafter (speculation/head_drafter.h) says what it runs.
#pragma once

#include <memory>
#include <vector>

#include "api/engine_config.h"
#include "comm/single_communicator.h"
#include "core/arena.h"
#include "engine/kv_storage.h"
#include "engine/worker.h"
#include "io/bus_errors.h"
#include "models/draft_heads/draft_head.h"
#include "sampling/sampler.h"
#include "speculation/head_model.h"

namespace llmserve {

// Tokens whose states are kept at most: of the largest step, and the newest of each sequence.
int64_t num_kept_states(const EngineConfig& config);
// What a head takes beside its weights and its KV cache.
int64_t head_workspace_bytes(const DraftHead& head, const EngineConfig& config);

class HeadWorker final : public HeadModel {
 public:
  // Loads the head of config.model_path for `target`, which outlives it and whose backend it
  // computes on. Throws what read_head_config and loading throw, and NotSupported on a device.
  HeadWorker(HeadKind kind, const EngineConfig& config, const Worker& target);

  const CacheConfig& cache() const override { return config_.cache; }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_step_rows() const override { return config_.scheduler.max_num_batched_tokens; }
  int32_t max_guesses() const override { return head_->config().max_guesses(); }
  std::vector<int32_t> wanted_layers() const override { return wanted_layers_; }
  int64_t num_kept() const override { return num_kept_states(config_); }
  void keep(const Tensor& states, int64_t token, int32_t kept) override;
  const SampledTokens& run(const HeadStep& step) override;
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
  void load();
  void check_files() const;
  void lay_out(const HeadStep& step);
  void read_features(const ForwardContext& context, const HeadStep& step, const Tensor& features);
  void draw(const ConstTensor& logits, std::span<const SampleTask> tasks);

  const HeadKind kind_;
  const EngineConfig config_;
  const Worker& target_;
  Backend& backend_;
  std::unique_ptr<DraftHead> head_;  // its weights may be given back, its config stays
  bool has_weights_ = false;
  // Of the files that its weights came from, of which some are read in place.
  std::vector<std::shared_ptr<const ReadState>> files_;
  std::vector<int32_t> wanted_layers_;  // increasing, each once
  std::vector<int64_t> state_places_;   // of the head's layers among them
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<KvStorage> kv_storage_;
  Buffer kept_;                 // [num_kept, state size] f32
  std::vector<float> outputs_;  // [S, H] of the last run's logit rows
  int64_t workspace_bytes_ = 0;
  int64_t scratch_bytes_ = 0;  // that the backend reserved for it, and keeps
  Sampler sampler_;
  SampledTokens sampled_;
  std::vector<float> expanded_;  // [rows, V of the target]
  bool keeps_logits_ = false;
  std::vector<float> logits_;
  SingleCommunicator alone_;
  const ParallelGroups groups_{.tp = alone_, .pp = alone_, .ep = alone_, .cp = alone_};
  // A step's arrays.
  std::vector<int32_t> query_starts_;
  std::vector<int32_t> kv_lens_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> block_tables_;
  std::vector<KvGroupInput> kv_groups_;
  std::vector<std::pair<int32_t, int32_t>> copies_;
  ModelInput input_;
};

}  // namespace llmserve
