// The sizes of multi-head latent attention. DeepSeek-AI 2024, section 2.1.
#pragma once

#include <cstdint>

namespace llmserve {

// A head's query and key have a part without positions and a rotated one, which the keys of all
// heads share. A token keeps a latent, of which the heads' keys and values are made, and the
// rotated part of its key.
struct LatentDims {
  int64_t query_rank = 0;  // elements that queries are made of; 0: of the hidden state itself
  int64_t rank = 0;        // elements of the latent; 0: the model has none
  int64_t plain_dim = 0;   // of a head's query and key, not rotated
  int64_t rotary_dim = 0;  // and rotated
  int64_t value_dim = 0;   // of a head
  float norm_eps = 1e-6f;  // of the norms of the latent and of what queries are made of

  int64_t query_dim() const { return plain_dim + rotary_dim; }  // of a head
  int64_t row_dim() const { return rank + rotary_dim; }         // that a token keeps
  bool operator==(const LatentDims&) const = default;
};

}  // namespace llmserve
