// A linear layer of each head: y[h] = x[h] W_h^T.
#pragma once

#include <vector>

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

class HeadLinear {
 public:
  // parts[h]: the matrix [N, K] of head h, or [K, N] if the file has them transposed.
  HeadLinear(WeightLoader& weights, WeightGroup group, const std::vector<WeightPart>& parts,
             int64_t in_features, bool is_transposed = false);

  // out [T, H, N] = x [T, H, K] W^T; tokens and heads may be strided.
  void forward(const ForwardContext& context, const Tensor& x, const Tensor& out) const;

 private:
  std::vector<LinearWeight> weights_;  // [H]
};

}  // namespace llmserve
