// Heads that read an embedding beside the target's final hidden state, or beside their own guess of
// it, and have one layer like the target's: EAGLE (Li et al. 2024, arXiv 2401.15077) and
// multi-token prediction (DeepSeek-AI 2024, section 2.2), whose parts are normed.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "layers/embedding.h"
#include "layers/lm_head.h"
#include "layers/norm.h"
#include "models/decoder.h"
#include "models/draft_heads/draft_head.h"

namespace llmserve {

class EagleLayer {
 public:
  EagleLayer(const HeadConfig& config, WeightLoader& weights);

  void forward(const ForwardContext& context, const Model& target, const PagedKvCache& cache,
               const Tensor& features) const;
  Tensor compute_logits(const ForwardContext& context, const Model& target,
                        const ConstTensor& features, std::span<const int32_t> rows) const;
  int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const;

 private:
  const HeadConfig config_;
  std::optional<Embedding> embedding_;  // none: the target's
  // Of multi-token prediction.
  std::optional<Norm> embedding_norm_;
  std::optional<Norm> feature_norm_;
  std::optional<Norm> final_norm_;
  Linear fc_;
  DecoderLayer layer_;
  std::optional<LmHead> lm_head_;  // none: the target's
  std::vector<Rotary> rotaries_;
};

// A layer for all places, or one for each.
class EagleHead final : public DraftHead {
 public:
  EagleHead(HeadConfig config, WeightLoader& weights);

  void forward(const ForwardContext& context, const Model& target, const Tensor& features,
               int32_t place) const override;
  Tensor compute_logits(const ForwardContext& context, const Model& target,
                        const ConstTensor& features, std::span<const int32_t> rows,
                        int32_t place) const override;
  int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const override;

 private:
  size_t layer_of(int32_t place) const {
    return std::min(static_cast<size_t>(place), layers_.size() - 1);
  }

  std::vector<EagleLayer> layers_;
};

}  // namespace llmserve
