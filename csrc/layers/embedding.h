// Token ids to vectors.
#pragma once

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

class Embedding {
 public:
  Embedding(WeightLoader& weights, const std::string& name, int64_t vocab_size, int64_t hidden_size,
            float scale = 1.0f)
      : table_(weights.table(WeightGroup::kEmbedding, name, vocab_size, hidden_size)),
        scale_(scale) {}

  // out [T, E] = table[token_ids] * scale, or the row that the request gave.
  void forward(const ForwardContext& context, const Tensor& out) const {
    context.backend.embedding({.table = table_.view,
                               .token_ids = context.input.token_ids,
                               .out = out,
                               .scale = scale_,
                               .given = context.input.given_embeddings});
  }

 private:
  TableWeight table_;  // [V, E], read in place: a step touches T rows of it
  float scale_;
};

}  // namespace llmserve
