#include "engine/kv_block_bytes.h"

#include <algorithm>
#include <cstring>

#include "core/trace_range.h"
#include "kernels/device_copies.h"

namespace llmserve {
namespace {

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

// Pieces side by side are one copy.
void add_piece(std::vector<DevicePiece>& pieces, std::byte* data, size_t size) {
  const auto num_bytes = static_cast<int64_t>(size);
  if (!pieces.empty() && pieces.back().data + pieces.back().num_bytes == data)
    pieces.back().num_bytes += num_bytes;
  else
    pieces.push_back({.data = data, .num_bytes = num_bytes});
}

}  // namespace

KvBlockBytes::KvBlockBytes(const std::vector<const Worker*>& workers)
    : groups_([&] {
        const auto rows = row_groups(workers[0]->config().cache.groups);
        return std::vector<CacheGroupSpec>(rows.begin(), rows.end());
      }()),
      dtype_(workers[0]->config().kv_cache_dtype),
      block_size_(workers[0]->config().cache.block_size),
      workers_(workers),
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
    parts.push_back({.worker = lane.worker,
                     .tensor = are_values ? cache.values : cache.keys,
                     .is_in_panels = !are_values && cache.key_layout == KeyLayout::kPanels,
                     .first_head = lane.worker->first_kv_head()});
  }
  return parts;
}

template <class Visit>
void KvBlockBytes::for_each_head(uint16_t group, const Visit& visit) const {
  const CacheGroupSpec& spec = groups_[group];
  size_t at = 0;
  const auto visit_lane = [&](const std::vector<Lane>& lane, bool are_values) {
    const std::vector<Part> ranks = parts(lane, are_values);
    const int64_t width = are_values ? spec.value_dim : spec.key_dim;
    Head head{.range = {.size = static_cast<size_t>(block_size_ * cache_row_bytes(dtype_, width))}};
    for (; head.idx < spec.num_kv_heads; ++head.idx, at += head.range.size) {
      head.range.begin = at;
      head.parts.clear();
      for (const Part& part : ranks)
        if (part.first_head <= head.idx && head.idx < part.first_head + part.tensor.shape[1])
          head.parts.push_back(&part);
      if (!head.parts.empty()) visit(head);
    }
  };
  for (const std::vector<Lane>& lane : lanes_[group]) {
    visit_lane(lane, false);
    if (!spec.values_in_keys) visit_lane(lane, true);
  }
}

std::vector<ByteRange> KvBlockBytes::ranges(uint16_t group) const {
  std::vector<ByteRange> ranges;
  for_each_head(group, [&](const Head& head) {
    if (!ranges.empty() && ranges.back().begin + ranges.back().size == head.range.begin)
      ranges.back().size += head.range.size;
    else
      ranges.push_back(head.range);
  });
  return ranges;
}

void KvBlockBytes::read_head(const Part& part, const std::byte* from, int64_t num_tokens,
                             std::span<std::byte> to) {
  const Tensor& tensor = part.tensor;
  const int64_t row_bytes = tensor.shape[3] * size_bytes(tensor.dtype);
  const auto all_rows = static_cast<size_t>(tensor.shape[2] * row_bytes);
  if (part.is_in_panels) {
    for_each_run(tensor, [&](int64_t in_panel, int64_t in_rows) {
      std::memcpy(to.data() + in_rows, from + in_panel, kRunBytes);
    });
    std::memcpy(to.data() + all_rows, from + all_rows, to.size() - all_rows);
  } else {
    std::memcpy(to.data(), from, to.size());
  }
  // What lies behind is of another sequence, or of none.
  const int64_t num_behind = tensor.shape[2] - num_tokens;
  std::memset(to.data() + num_tokens * row_bytes, 0, static_cast<size_t>(num_behind * row_bytes));
  if (to.size() > all_rows)
    std::memset(to.data() + all_rows + num_tokens * kCacheScaleBytes, 0,
                static_cast<size_t>(num_behind * kCacheScaleBytes));
}

void KvBlockBytes::write_head(const Part& part, Bytes from, std::byte* to) {
  if (!part.is_in_panels) {
    std::memcpy(to, from.data(), from.size());
    return;
  }
  for_each_run(part.tensor, [&](int64_t in_panel, int64_t in_rows) {
    std::memcpy(to + in_panel, from.data() + in_rows, kRunBytes);
  });
  const auto all_rows = static_cast<size_t>(part.tensor.shape[2] * part.tensor.shape[3] *
                                            size_bytes(part.tensor.dtype));
  std::memcpy(to + all_rows, from.data() + all_rows, from.size() - all_rows);
}

// Of a head that several ranks have, the first one's is read.
void KvBlockBytes::read(uint16_t group, int32_t block, int64_t num_tokens,
                        std::span<std::byte> out) const {
  const TraceRange range("Block to a peer");
  const auto place = [&](const Head& head) {
    return out.subspan(head.range.begin, head.range.size);
  };
  const auto address = [&](const Head& head) {
    const Part& part = *head.parts[0];
    return head_of(part.tensor, block, head.idx - part.first_head);
  };
  for (const Worker* worker : workers_) {
    DeviceCopies* const copies = worker->copies();
    const auto for_each_own = [&](const auto& visit) {
      for_each_head(group, [&](const Head& head) {
        if (head.parts[0]->worker == worker) visit(head);
      });
    };
    if (copies == nullptr) {
      for_each_own([&](const Head& head) {
        read_head(*head.parts[0], address(head), num_tokens, place(head));
      });
      continue;
    }
    std::vector<DevicePiece> pieces;
    for_each_own([&](const Head& head) { add_piece(pieces, address(head), head.range.size); });
    if (pieces.empty()) continue;
    copies->read(pieces, [&](const std::byte* staged) {
      for_each_own([&](const Head& head) {
        read_head(*head.parts[0], staged, num_tokens, place(head));
        staged += head.range.size;
      });
    });
  }
}

void KvBlockBytes::write(uint16_t group, int32_t block, Bytes in) {
  const TraceRange range("Block from a peer");
  for (const Worker* worker : workers_) {
    DeviceCopies* const copies = worker->copies();
    // visit(part, of its head on the wire, of its head in the cache)
    const auto for_each_own = [&](const auto& visit) {
      for_each_head(group, [&](const Head& head) {
        const auto own = std::ranges::find(head.parts, worker, &Part::worker);
        if (own == head.parts.end()) return;
        visit(**own, in.subspan(head.range.begin, head.range.size),
              head_of((*own)->tensor, block, head.idx - (*own)->first_head));
      });
    };
    if (copies == nullptr) {
      for_each_own([](const Part& part, Bytes from, std::byte* to) { write_head(part, from, to); });
      continue;
    }
    std::vector<DevicePiece> pieces;
    for_each_own(
        [&](const Part&, Bytes from, std::byte* to) { add_piece(pieces, to, from.size()); });
    if (pieces.empty()) continue;
    copies->write(pieces, [&](std::byte* staged) {
      for_each_own([&](const Part& part, Bytes from, std::byte*) {
        write_head(part, from, staged);
        staged += from.size();
      });
    });
  }
}

}  // namespace llmserve
