#include "models/model.h"

#include "core/error.h"

namespace llmserve {

int64_t Model::kv_bytes_per_token(DType dtype) const {
  int64_t bytes = 0;
  for (const CacheGroupSpec& group : row_groups(cache_groups()))
    bytes += group.num_layers * row_bytes(group, dtype);
  return bytes;
}

}  // namespace llmserve
