// What one layer of a model keeps of the tokens that it has seen.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace llmserve {

struct KvLayerSpec {
  int64_t num_kv_heads = 0;  // K
  int64_t key_dim = 0;       // D
  int64_t value_dim = 0;     // Dv
  int32_t window = 0;        // tokens that the layer looks back; 0: all
  int32_t group = 0;         // whose blocks have its keys and values: LayerTraits
  int32_t lane = 0;          // as which of the group's layers

  int64_t elements_per_token() const { return num_kv_heads * (key_dim + value_dim); }
  int64_t bytes_per_token(DType dtype) const {
    return num_kv_heads * (cache_row_bytes(dtype, key_dim) + cache_row_bytes(dtype, value_dim));
  }
  friend bool operator==(const KvLayerSpec&, const KvLayerSpec&) = default;
};

}  // namespace llmserve
