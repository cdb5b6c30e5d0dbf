// Medusa: heads on the final hidden state, each of which guesses one of the next tokens by itself.
// Cai et al. 2024 (arXiv 2401.10774).
#pragma once

#include <vector>

#include "layers/linear.h"
#include "layers/lm_head.h"
#include "models/draft_heads/draft_head.h"

namespace llmserve {

class MedusaHead final : public DraftHead {
 public:
  MedusaHead(HeadConfig config, WeightLoader& weights);

  void forward(const ForwardContext& context, const Model& target, const Tensor& features,
               int32_t) const override;
  Tensor compute_logits(const ForwardContext& context, const Model& target,
                        const ConstTensor& features, std::span<const int32_t> rows,
                        int32_t place) const override;
  int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const override;

 private:
  struct Head {
    std::vector<Linear> blocks;  // x += silu(block(x))
    LmHead out;
  };
  std::vector<Head> heads_;  // by place
};

}  // namespace llmserve
