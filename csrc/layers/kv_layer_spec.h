// What one layer of a model keeps of the tokens that it has seen: a row of keys and one of values a
// token and KV head, or a state of fixed size a sequence.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace llmserve {

struct KvLayerSpec {
  int64_t num_kv_heads = 0;  // K
  int64_t key_dim = 0;       // D
  int64_t value_dim = 0;     // Dv
  // The value is the first Dv elements of the key's row, which is kept alone: what multi-head
  // latent attention keeps. DeepSeek-AI 2024, section 2.1.
  bool values_in_keys = false;
  int64_t state_bytes = 0;  // a sequence, beside the rows; 0: none
  int32_t window = 0;       // tokens that the layer looks back; 0: all
  int32_t group = 0;        // whose blocks have its keys and values: LayerTraits
  int32_t lane = 0;         // as which of the group's layers

  int64_t num_rows() const { return num_kv_heads * (values_in_keys ? 1 : 2); }  // a token
  int64_t elements_per_token() const {
    return num_kv_heads * (key_dim + (values_in_keys ? 0 : value_dim));
  }
  int64_t bytes_per_token(DType dtype) const {
    const int64_t value_bytes = values_in_keys ? 0 : cache_row_bytes(dtype, value_dim);
    return num_kv_heads * (cache_row_bytes(dtype, key_dim) + value_bytes);
  }
  // Whether the rows of both take the same room.
  bool has_rows_of(const KvLayerSpec& other) const {
    return num_kv_heads == other.num_kv_heads && key_dim == other.key_dim &&
           value_dim == other.value_dim && values_in_keys == other.values_in_keys;
  }
  friend bool operator==(const KvLayerSpec&, const KvLayerSpec&) = default;
};

}  // namespace llmserve
