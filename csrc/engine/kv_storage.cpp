#include "engine/kv_storage.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "core/error.h"

namespace llmserve {
namespace {

// What is had at hand at once: of so many pools a large page, 5 ms where a slow host has to give
// it.
constexpr int64_t kPoolsAtOnce = 4;
constexpr int64_t kTouchedBytes = 2 << 20;

}  // namespace

std::shared_ptr<Buffer> SharedKvRows::take(int64_t num_bytes, Memory& memory) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Buffer> rows = rows_.lock();
  if (!rows) rows_ = rows = std::make_shared<Buffer>(num_bytes, memory);
  check_internal(rows->num_bytes() == num_bytes, "ranks keep as many rows together");
  return rows;
}

KvStorage::KvStorage(std::span<const CacheGroupSpec> groups, std::span<const KvPlace> places,
                     const Shape& shape, Backend& backend, const KvSharing& sharing)
    : rank_(sharing.rank),
      kept_states_(shape.num_state_slots * state_bytes(groups), backend.memory()) {
  const int64_t all_rows = shape.num_blocks * shape.block_size * num_lanes(groups) *
                           row_bytes(groups.front(), shape.dtype);
  if (sharing.rows) {
    num_ranks_ = sharing.rows->num_ranks();
    rows_ = sharing.rows->take(all_rows, backend.memory());
  } else {
    rows_ = std::make_shared<Buffer>(all_rows, backend.memory());
  }
  std::byte* next = rows_->data();
  const auto take = [&](int64_t num_heads, int64_t dim) {
    const Tensor pool =
        cache_part(next, shape.dtype, shape.num_blocks, num_heads, shape.block_size, dim);
    const int64_t num_bytes = shape.num_blocks * cache_block_bytes(pool);
    pools_.push_back({.data = next, .block_bytes = cache_block_bytes(pool)});
    // The first blocks are given out first, and a first prompt writes a few of every pool.
    backend.memory().begin_small(next, num_bytes);
    next += num_bytes;
    return pool;
  };
  const CacheGroupSpec& rows = groups.front();  // all groups of rows have the same
  for (int32_t lane = 0; lane < num_lanes(groups); ++lane) {
    const Tensor keys = take(rows.num_kv_heads, rows.key_dim);
    if (rows.values_in_keys) {  // in rows
      lanes_.push_back({.keys = keys, .values = keys});
      continue;
    }
    lanes_.push_back({.keys = keys,
                      .values = take(rows.num_kv_heads, rows.value_dim),
                      .key_layout = backend.key_layout(shape.block_size, rows.key_dim,
                                                       rows.value_dim, shape.dtype)});
  }
  next = kept_states_.data();
  for (const KvPlace& place : places) {
    PagedKvCache& cache = layers_.emplace_back();
    if (place.group >= 0) cache = lanes_[static_cast<size_t>(place.lane)];
    if (place.group >= 0 && rows.values_in_keys)
      cache.values = cache.keys.slice(3, 0, rows.value_dim);
    const int64_t bytes =
        place.state_group < 0 ? 0 : groups[static_cast<size_t>(place.state_group)].state_bytes;
    states_.push_back(bytes == 0 ? Tensor()
                                 : Tensor(next, DType::kU8, {shape.num_state_slots, bytes}));
    next += shape.num_state_slots * bytes;
  }
}

int64_t KvStorage::num_bytes() const {
  const int64_t rows = rows_->num_bytes();
  return rows * (rank_ + 1) / num_ranks_ - rows * rank_ / num_ranks_ + kept_states_.num_bytes();
}

int64_t KvStorage::block_bytes() const {
  int64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += pool.block_bytes;
  return bytes;
}

bool KvStorage::touch(Memory& memory, Pool& pool, int64_t num_blocks, int64_t num_bytes) const {
  num_bytes = std::min(num_bytes, num_blocks * pool.block_bytes - pool.touched_bytes);
  if (num_bytes <= 0) return false;
  const int64_t begin = pool.touched_bytes;
  const int64_t end = begin + num_bytes;
  for (int64_t at = begin, next = end; at < end; at = next) {
    if (num_ranks_ > 1) {
      next = std::min(end, (at / kTouchedBytes + 1) * kTouchedBytes);
      if (at / kTouchedBytes % num_ranks_ != rank_) continue;
    }
    if (!memory.touch(pool.data + at, next - at)) return false;
  }
  pool.touched_bytes = end;
  return true;
}

bool KvStorage::touch(Backend& backend, int64_t num_blocks) {
  std::array<Pool*, kPoolsAtOnce> pools;
  int64_t count = 0;
  for (Pool& pool : pools_)
    if (count < kPoolsAtOnce && pool.touched_bytes < num_blocks * pool.block_bytes)
      pools[static_cast<size_t>(count++)] = &pool;
  std::atomic<bool> is_given{false};
  backend.run_on_host_threads(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (touch(backend.memory(), *pools[static_cast<size_t>(i)], num_blocks, kTouchedBytes))
        is_given = true;
  });
  return is_given;
}

void KvStorage::touch_all(Backend& backend, int64_t num_blocks) {
  backend.run_on_host_threads(std::ssize(pools_), 1, [&](int64_t begin, int64_t end) {
    for (Pool& pool : std::span(pools_).subspan(begin, end - begin))
      touch(backend.memory(), pool, num_blocks, num_blocks * pool.block_bytes);
  });
}

void KvStorage::copy_blocks(Backend& backend,
                            std::span<const std::pair<int32_t, int32_t>> pairs) const {
  if (pairs.empty()) return;
  for (const PagedKvCache& lane : lanes_) backend.copy_blocks({.pairs = pairs, .cache = lane});
}

}  // namespace llmserve
