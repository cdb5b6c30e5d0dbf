#include "engine/kv_storage.h"

#include <algorithm>

namespace llmserve {
namespace {

// Of memory that is had at hand at once: a large page, 5 ms where a slow host has to give it.
constexpr int64_t kTouchedBytes = 2 << 20;

int64_t pool_bytes(std::span<const KvLayerSpec> lanes, int64_t num_tokens, DType dtype) {
  int64_t bytes = 0;
  for (const KvLayerSpec& lane : lanes) bytes += num_tokens * lane.bytes_per_token(dtype);
  return bytes;
}

}  // namespace

KvStorage::KvStorage(std::span<const KvLayerSpec> layers, int64_t num_blocks, int64_t block_size,
                     DType dtype, Backend& backend)
    : buffer_(pool_bytes(kv_lanes(layers), num_blocks * block_size, dtype), backend.memory()) {
  std::byte* next = buffer_.data();
  const auto take = [&](int64_t num_heads, int64_t dim) {
    const Tensor pool = cache_part(next, dtype, num_blocks, num_heads, block_size, dim);
    const int64_t num_bytes = num_blocks * cache_block_bytes(pool);
    pools_.push_back({.data = next, .block_bytes = cache_block_bytes(pool)});
    // The first blocks are given out first, and a first prompt writes a few of every pool.
    backend.memory().begin_small(next, num_bytes);
    next += num_bytes;
    return pool;
  };
  for (const KvLayerSpec& lane : kv_lanes(layers)) {
    const Tensor keys = take(lane.num_kv_heads, lane.key_dim);
    lanes_.push_back(
        {.keys = keys,
         .values = take(lane.num_kv_heads, lane.value_dim),
         .key_layout = backend.key_layout(block_size, lane.key_dim, lane.value_dim, dtype)});
  }
  for (const KvLayerSpec& layer : layers)
    layers_.push_back(lanes_[static_cast<size_t>(layer.lane)]);
}

bool KvStorage::touch(Memory& memory, int64_t num_blocks) {
  for (Pool& pool : pools_) {
    const int64_t left = num_blocks * pool.block_bytes - pool.touched_bytes;
    if (left <= 0) continue;
    const int64_t num_bytes = std::min(left, kTouchedBytes);
    if (!memory.touch(pool.data + pool.touched_bytes, num_bytes)) return false;
    pool.touched_bytes += num_bytes;
    return true;
  }
  return false;
}

void KvStorage::touch_all(Backend& backend, int64_t num_blocks) {
  backend.run_on_host_threads(std::ssize(pools_), 1, [&](int64_t begin, int64_t end) {
    for (Pool& pool : std::span(pools_).subspan(begin, end - begin)) {
      const int64_t left = num_blocks * pool.block_bytes - pool.touched_bytes;
      if (left <= 0 || !backend.memory().touch(pool.data + pool.touched_bytes, left)) continue;
      pool.touched_bytes += left;
    }
  });
}

void KvStorage::copy_blocks(Backend& backend,
                            std::span<const std::pair<int32_t, int32_t>> pairs) const {
  if (pairs.empty()) return;
  for (const PagedKvCache& lane : lanes_) backend.copy_blocks({.pairs = pairs, .cache = lane});
}

}  // namespace llmserve
