// Where a layer's part of a sequence's cache is: which of a group's layers it is. A layer has a
// place in a group of rows, in one of states, or in both.
#pragma once

#include <cstdint>

#include "core/cache_group.h"
#include "kernels/ops.h"

namespace llmserve {

struct KvPlace {
  int32_t group = -1;  // of rows
  int32_t lane = -1;   // as which of its layers
  int32_t state_group = -1;
  int32_t state_lane = -1;

  friend bool operator==(const KvPlace&, const KvPlace&) = default;
};

// Of a token, in one layer of a group of rows.
inline int64_t row_bytes(const CacheGroupSpec& group, DType dtype) {
  const int64_t value_bytes = group.values_in_keys ? 0 : cache_row_bytes(dtype, group.value_dim);
  return group.num_kv_heads * (cache_row_bytes(dtype, group.key_dim) + value_bytes);
}

}  // namespace llmserve
