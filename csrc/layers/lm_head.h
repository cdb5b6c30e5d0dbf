// Hidden states to logits, for the rows that are asked for.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

class LmHead {
 public:
  // What becomes of the logits: cap_logits of kernels/ops.h.
  struct Scaling {
    float scale = 1.0f;
    float soft_cap = 0.0f;  // 0: none
  };
  // "<name>.weight" is the matrix [V, E]: a tied head names the embedding and packs a copy of its
  // own.
  LmHead(WeightLoader& weights, const std::string& name, int64_t vocab_size, int64_t hidden_size,
         const Scaling& scaling)
      : weight_(std::move(weights.linear(WeightGroup::kLmHead, {{name + ".weight", vocab_size}},
                                         hidden_size)[0])),
        scaling_(scaling) {}

  // logits [rows.size(), V] of rows of hidden [T, E], in the arena scope of the caller.
  Tensor forward(const ForwardContext& context, const ConstTensor& hidden,
                 std::span<const int32_t> rows) const;
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  LinearWeight weight_;
  Scaling scaling_;
};

}  // namespace llmserve
