#include "kernels/cuda/experts/id_counts.h"

#include <atomic>
#include <utility>

namespace llmserve::cuda {
namespace {

constexpr auto kCountBytes = static_cast<int64_t>(sizeof(int64_t));

}  // namespace

DeviceIdCounts::DeviceIdCounts(int64_t size, DeviceMemory& memory, PinnedMemory& pinned,
                               FindHeader find_header)
    : memory_(memory),
      find_header_(std::move(find_header)),
      totals_(size * kCountBytes, memory),
      seen_(size * kCountBytes, pinned) {}

void DeviceIdCounts::add(const ConstTensor& ids, int64_t begin, int64_t num_ids) {
  memory_.make_current();
  count_ids({.ids = ids.as<int32_t>(),
             .num_tokens = ids.shape[0],
             .top_k = ids.shape[1],
             .num_ids = num_ids,
             .header = find_header_(),
             .totals = reinterpret_cast<int64_t*>(totals_.data()) + begin,
             .seen = reinterpret_cast<int64_t*>(seen_.data()) + begin},
            memory_.stream());
}

int64_t DeviceIdCounts::count(int64_t i) const {
  auto* seen = reinterpret_cast<int64_t*>(const_cast<std::byte*>(seen_.data()));
  return std::atomic_ref<int64_t>(seen[i]).load(std::memory_order_relaxed);
}

}  // namespace llmserve::cuda
