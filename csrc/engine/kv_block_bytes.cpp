#include "engine/kv_block_bytes.h"

#include <algorithm>
#include <cstring>

namespace llmserve {
namespace {

// Bytes of one head of a block: rows, and in f8 their scales.
int64_t head_bytes(const Tensor& part) {
  return part.shape[2] * cache_row_bytes(part.dtype, part.shape[3]);
}

std::byte* head_of(const Tensor& part, int64_t block, int64_t head) {
  return static_cast<std::byte*>(part.data) +
         (block * part.strides[0] + head * part.strides[1]) * size_bytes(part.dtype);
}

// A panel has 16 tokens side by side, each of which brings 4 bytes in its turn: to and from rows.
constexpr int64_t kRunBytes = 4;

template <class Visit>
void for_each_run(const Tensor& part, const Visit& visit) {
  const int64_t row_bytes = part.shape[3] * size_bytes(part.dtype);
  int64_t at = 0;
  for (int64_t first = 0; first < part.shape[2]; first += kKeyPanelTokens)
    for (int64_t in_row = 0; in_row < row_bytes; in_row += kRunBytes)
      for (int64_t token = first; token < first + kKeyPanelTokens; ++token, at += kRunBytes)
        visit(at, token * row_bytes + in_row);
}

}  // namespace

KvBlockBytes::KvBlockBytes(const std::vector<const Worker*>& workers)
    : groups_([&] {
        const auto rows = row_groups(workers[0]->config().cache.groups);
        return std::vector<CacheGroupSpec>(rows.begin(), rows.end());
      }()),
      dtype_(workers[0]->config().kv_cache_dtype),
      block_size_(workers[0]->config().cache.block_size),
      lanes_(groups_.size()) {
  shape_.block_size = static_cast<uint32_t>(block_size_);
  for (const CacheGroupSpec& group : groups_)
    shape_.block_bytes.push_back(
        static_cast<uint64_t>(group.num_layers * block_size_ * row_bytes(group, dtype_)));
  for (size_t g = 0; g < groups_.size(); ++g)
    lanes_[g].resize(static_cast<size_t>(groups_[g].num_layers));
  const std::span<const KvPlace> places = workers[0]->kv_places();
  for (size_t layer = 0; layer < places.size(); ++layer) {
    if (places[layer].group < 0) continue;
    std::vector<Lane> ranks;
    for (const Worker* worker : workers) {
      const KvPlace& own = worker->own_kv_places()[layer];
      if (own.group >= 0) ranks.push_back({.worker = worker, .idx = static_cast<size_t>(own.lane)});
    }
    lanes_[static_cast<size_t>(places[layer].group)][static_cast<size_t>(places[layer].lane)] =
        std::move(ranks);
  }
}

std::vector<KvBlockBytes::Part> KvBlockBytes::parts(const std::vector<Lane>& ranks,
                                                    bool are_values) {
  std::vector<Part> parts;
  for (const Lane& lane : ranks) {
    const PagedKvCache& cache = lane.worker->kv_storage().lanes()[lane.idx];
    parts.push_back({.tensor = are_values ? cache.values : cache.keys,
                     .is_in_panels = !are_values && cache.key_layout == KeyLayout::kPanels,
                     .first_head = lane.worker->first_kv_head()});
  }
  return parts;
}

void KvBlockBytes::read(uint16_t group, int32_t block, int64_t num_tokens,
                        std::span<std::byte> out) const {
  const CacheGroupSpec& spec = groups_[group];
  std::byte* to = out.data();
  const auto read_heads = [&](const std::vector<Lane>& lane, bool are_values) {
    const std::vector<Part> ranks = parts(lane, are_values);
    for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
      const auto part = std::ranges::find_if(ranks, [&](const Part& one) {
        return one.first_head <= head && head < one.first_head + one.tensor.shape[1];
      });
      check_internal(part != ranks.end(), "each KV head is on a rank");
      const Tensor& tensor = part->tensor;
      const std::byte* const from = head_of(tensor, block, head - part->first_head);
      const int64_t num_bytes = head_bytes(tensor);
      const int64_t row_bytes = tensor.shape[3] * size_bytes(tensor.dtype);
      if (part->is_in_panels) {
        for_each_run(tensor, [&](int64_t in_panel, int64_t in_rows) {
          std::memcpy(to + in_rows, from + in_panel, kRunBytes);
        });
        const int64_t all_rows = block_size_ * row_bytes;
        std::memcpy(to + all_rows, from + all_rows, static_cast<size_t>(num_bytes - all_rows));
      } else {
        std::memcpy(to, from, static_cast<size_t>(num_bytes));
      }
      // What lies behind is of another sequence, or of none.
      std::memset(to + num_tokens * row_bytes, 0,
                  static_cast<size_t>((block_size_ - num_tokens) * row_bytes));
      if (num_bytes > block_size_ * row_bytes)
        std::memset(to + block_size_ * row_bytes + num_tokens * kCacheScaleBytes, 0,
                    static_cast<size_t>((block_size_ - num_tokens) * kCacheScaleBytes));
      to += num_bytes;
    }
  };
  for (const std::vector<Lane>& lane : lanes_[group]) {
    read_heads(lane, false);
    if (!spec.values_in_keys) read_heads(lane, true);
  }
}

void KvBlockBytes::write(uint16_t group, int32_t block, Bytes in) {
  const CacheGroupSpec& spec = groups_[group];
  const std::byte* from = in.data();
  const auto write_heads = [&](const std::vector<Lane>& lane, bool are_values) {
    const std::vector<Part> ranks = parts(lane, are_values);
    for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
      const int64_t num_bytes = head_bytes(ranks[0].tensor);
      for (const Part& part : ranks) {
        const Tensor& tensor = part.tensor;
        if (head < part.first_head || head >= part.first_head + tensor.shape[1]) continue;
        std::byte* const to = head_of(tensor, block, head - part.first_head);
        if (part.is_in_panels) {
          for_each_run(tensor, [&](int64_t in_panel, int64_t in_rows) {
            std::memcpy(to + in_panel, from + in_rows, kRunBytes);
          });
          const int64_t all_rows = block_size_ * tensor.shape[3] * size_bytes(tensor.dtype);
          std::memcpy(to + all_rows, from + all_rows, static_cast<size_t>(num_bytes - all_rows));
        } else {
          std::memcpy(to, from, static_cast<size_t>(num_bytes));
        }
      }
      from += num_bytes;
    }
  };
  for (const std::vector<Lane>& lane : lanes_[group]) {
    write_heads(lane, false);
    if (!spec.values_in_keys) write_heads(lane, true);
  }
}

}  // namespace llmserve
