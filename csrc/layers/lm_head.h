// Hidden states to logits, for the rows that are asked for.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "layers/forward_context.h"
#include "layers/rank_cut.h"
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
        rank_(weights.rank().rank),
        cut_(weights.rank(), spec.vocab_size, "tokens in its vocabulary"),
        weight_(std::move(weights.linear(WeightGroup::kLmHead,
                                         {{name + ".weight", spec.vocab_size}}, spec.hidden_size,
                                         /*is_transposed=*/false, cut_.shard())[0])) {
    if (!spec.bias.empty())
      bias_ = weights.vector(WeightGroup::kLmHead, {{spec.bias, spec.vocab_size}}, cut_.shard());
  }

  // logits [rows.size(), V] of rows of hidden [T, E], in the arena scope of the caller. Rank 0 has
  // them; the others compute their columns and give nothing.
  Tensor forward(const ForwardContext& context, const ConstTensor& hidden,
                 std::span<const int32_t> rows) const;
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  bool has_all() const { return rank_ == 0; }
  // Of the logits that are kept here.
  int64_t width() const { return has_all() ? spec_.vocab_size : cut_.size(); }

  LmHeadSpec spec_;
  int32_t rank_;
  ColumnCut cut_;  // of the vocabulary
  LinearWeight weight_;
  VectorWeight bias_;  // of its columns, or empty
};

}  // namespace llmserve
