#include "engine/kv_storage.h"

namespace llmserve {
namespace {

int64_t pool_bytes(std::span<const KvLayerSpec> layers, int64_t num_tokens, DType dtype) {
  int64_t bytes = 0;
  for (const KvLayerSpec& layer : layers) bytes += num_tokens * layer.bytes_per_token(dtype);
  return bytes;
}

}  // namespace

KvStorage::KvStorage(std::span<const KvLayerSpec> layers, int64_t num_blocks, int64_t block_size,
                     DType dtype, Memory& memory)
    : buffer_(pool_bytes(layers, num_blocks * block_size, dtype), memory) {
  std::byte* next = buffer_.data();
  const auto take = [&](int64_t num_heads, int64_t dim) {
    Tensor pool(next, dtype, {num_blocks, num_heads, block_size, dim});
    next += pool.num_bytes();
    return pool;
  };
  for (const KvLayerSpec& layer : layers) {
    const Tensor keys = take(layer.num_kv_heads, layer.key_dim);
    layers_.push_back({.keys = keys, .values = take(layer.num_kv_heads, layer.value_dim)});
  }
}

void KvStorage::copy_blocks(Backend& backend,
                            std::span<const std::pair<int32_t, int32_t>> pairs) const {
  if (pairs.empty()) return;
  for (const PagedKvCache& layer : layers_) backend.copy_blocks({.pairs = pairs, .cache = layer});
}

}  // namespace llmserve
