// Hidden states to logits, for the rows that are asked for.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct LmHeadSpec {
  int64_t vocab_size = 0;   // V
  int64_t hidden_size = 0;  // E
  std::string bias;         // the tensor [V] that is added to the logits; empty: none
  // What becomes of the logits: cap_logits of kernels/ops.h.
  float scale = 1.0f;
  float soft_cap = 0.0f;  // 0: none
};

class LmHead {
 public:
  // "<name>.weight" is the matrix [V, E]: a tied head names the embedding and packs a copy of its
  // own.
  LmHead(WeightLoader& weights, const std::string& name, const LmHeadSpec& spec)
      : spec_(spec),
        weight_(std::move(weights.linear(
            WeightGroup::kLmHead, {{name + ".weight", spec.vocab_size}}, spec.hidden_size)[0])) {
    if (!spec.bias.empty())
      bias_ = weights.vector(WeightGroup::kLmHead, spec.bias, spec.vocab_size);
  }

  // logits [rows.size(), V] of rows of hidden [T, E], in the arena scope of the caller.
  Tensor forward(const ForwardContext& context, const ConstTensor& hidden,
                 std::span<const int32_t> rows) const;
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  LmHeadSpec spec_;
  LinearWeight weight_;
  VectorWeight bias_;  // [V] or empty
};

}  // namespace llmserve
