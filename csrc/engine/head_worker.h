// A head beside its target, and its draws. Its ranks compute, on the target's threads and nodes.
// The drafter (speculation/head_drafter.h) says what it runs.
#pragma once

#include <functional>
#include <vector>

#include "api/engine_config.h"
#include "comm/rank_frame.h"
#include "engine/draft_choices.h"
#include "engine/head_wire.h"
#include "engine/local_head.h"
#include "engine/mask_filler.h"
#include "engine/worker.h"
#include "sampling/sampler.h"
#include "speculation/head_model.h"

namespace llmserve {

class HeadWorker final : public HeadModel {
 public:
  // What it computes beside: a worker each rank of this process, and how work goes on their
  // threads.
  struct Target {
    std::vector<const Worker*> workers;
    LocalHead::OnEachRank on_each_rank;
    LocalHead::OnEachRank run_on_ranks;  // where it may exchange
    MaskFiller& masks;
    // Sends a frame to the other nodes, whose ranks compute beside; none: there are none.
    std::function<void(RankFrameType type, Bytes payload)> tell;
  };
  // Loads the head of config.model_path for `target`, which outlives it. Throws what LocalHead
  // throws.
  HeadWorker(HeadKind kind, const EngineConfig& config, Target target);

  const CacheConfig& cache() const override { return config_.cache; }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_step_rows() const override { return config_.scheduler.max_num_batched_tokens; }
  int32_t max_guesses() const override { return head_.config().max_guesses(); }
  int32_t num_layers() const override { return static_cast<int32_t>(head_.config().num_layers()); }
  std::vector<int32_t> wanted_layers() const override { return head_.wanted_layers(); }
  int64_t num_kept() const override { return head_.num_kept(); }
  void keep(const Tensor& states, std::span<const int32_t> kept) override;
  const SampledTokens& run(HeadStep& step) override;
  std::span<const DraftChoice> choices(size_t row) const override { return choices_.of(row); }
  void forget(RequestId request_id, int32_t sample_index) override {
    sampler_.forget(request_id, sample_index);
  }

  // [S, D] of the last run, for tests; it runs at most kMaxLogitRowsAtOnce rows then.
  const std::vector<float>& last_logits() const { return logits_; }
  void keep_logits() { keeps_logits_ = true; }

  // From now on it throws: the nodes have met anew, and another one may have started anew.
  void note_lost_node() { has_lost_node_ = true; }

  MemoryUse memory_use() const { return head_.memory_use(); }
  void release(MemoryPart part) { head_.release(part); }
  void restore(MemoryPart part) { head_.restore(part); }

 private:
  void check_nodes() const;
  void draw(const ConstTensor& logits, const HeadStep& step, size_t begin);

  const EngineConfig config_;
  const Target target_;
  LocalHead head_;
  bool has_lost_node_ = false;
  std::vector<std::byte> wire_;  // for other nodes
  Sampler sampler_;
  SampledTokens sampled_;
  DraftChoices choices_;
  bool keeps_logits_ = false;
  std::vector<float> logits_;
};

}  // namespace llmserve
