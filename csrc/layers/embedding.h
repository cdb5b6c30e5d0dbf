// Token ids to vectors.
#pragma once

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

class Embedding {
 public:
  // "<name>.weight" is the matrix [V, E].
  Embedding(WeightLoader& weights, const std::string& name, int64_t vocab_size, int64_t hidden_size,
            float scale)
      : table_(weights.table(WeightGroup::kEmbedding, name + ".weight", vocab_size, hidden_size)),
        scale_(scale) {}

  // out [T, E] = table[token_ids] * scale, or the row that the request gave.
  void forward(const ForwardContext& context, const Tensor& out) const {
    context.backend.embedding({.table = table_.view,
                               .token_ids = context.input.token_ids,
                               .out = out,
                               .scale = scale_,
                               .given = context.input.given_embeddings,
                               .blocks = table_.blocks});
  }

 private:
  TableWeight table_;  // [V, E], read in place: a step touches T rows of it
  float scale_;
};

// Learned position embeddings. Radford et al. 2019.
class PositionEmbedding {
 public:
  // "<name>.weight" is the matrix [offset + max_positions, E], whose first rows nothing reads.
  PositionEmbedding(WeightLoader& weights, const std::string& name, int64_t offset,
                    int64_t max_positions, int64_t hidden_size)
      : table_(weights.table(WeightGroup::kEmbedding, name + ".weight", offset + max_positions,
                             hidden_size)) {
    if (table_.view) table_.view = table_.view.slice(0, offset, max_positions);
  }

  // hidden [T, E] += table[positions].
  void add_to(const ForwardContext& context, const Tensor& hidden) const {
    const Arena::Scope scope(context.arena);
    const Tensor rows = context.arena.allocate(DType::kF32, {hidden.shape[0], hidden.shape[1]});
    context.backend.embedding({.table = table_.view,
                               .token_ids = context.input.positions,
                               .out = rows,
                               .blocks = table_.blocks});
    context.backend.add({.out = hidden, .x = rows});
  }
  int64_t workspace_bytes(int64_t num_tokens, int64_t hidden_size) const {
    return Arena::footprint_bytes(DType::kF32, {num_tokens, hidden_size});
  }

 private:
  TableWeight table_;  // [max_positions, E], read in place, from position 0 on
};

}  // namespace llmserve
