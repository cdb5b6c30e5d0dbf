// EAGLE-3: one layer whose attention reads an embedding beside a feature, each normed. Li et al.
// 2025 (arXiv 2503.01840).
#pragma once

#include <optional>
#include <vector>

#include "layers/attention.h"
#include "layers/embedding.h"
#include "layers/lm_head.h"
#include "layers/mlp.h"
#include "layers/norm.h"
#include "models/draft_heads/draft_head.h"

namespace llmserve {

class Eagle3Head final : public DraftHead {
 public:
  Eagle3Head(HeadConfig config, WeightLoader& weights);

  void read_states(const ForwardContext& context, const Tensor& states,
                   const Tensor& features) const override;
  void forward(const ForwardContext& context, const Model& target, const Tensor& features,
               int32_t) const override;
  Tensor compute_logits(const ForwardContext& context, const Model& target,
                        const ConstTensor& features, std::span<const int32_t> rows,
                        int32_t place) const override;
  int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const override;

 private:
  std::optional<Embedding> embedding_;  // none: the target's
  std::vector<Norm> state_norms_;       // of all states, or of each layer's
  Linear fc_;
  Norm embedding_norm_;
  Norm feature_norm_;
  Attention attention_;
  Norm mlp_norm_;
  GatedMlp mlp_;
  Norm final_norm_;
  std::optional<LmHead> lm_head_;  // none: the target's
  std::vector<Rotary> rotaries_;
};

}  // namespace llmserve
