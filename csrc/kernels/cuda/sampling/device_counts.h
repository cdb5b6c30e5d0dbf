// Counts of sequences' tokens that stay on the device: a step brings over what is new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/buffer.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/sampling/count_updates.h"
#include "kernels/device_steps.h"
#include "kernels/ops.h"

namespace llmserve::cuda {

// A list a sequence, in memory of the backend's pool that grows with it and is used again by
// another one when it has ended. All that reads or writes lists is in the order of one stream.
class DeviceCounts {
 public:
  explicit DeviceCounts(DeviceMemory& memory) : memory_(memory) {}

  // Where a row's counts are once `updates`, to which what the device lacks of them is added, have
  // been applied. Precondition: kept.id is not 0. Throws ResourceExhausted.
  const DrawCount* bring_up(std::span<const TokenCount> counts, const KeptCounts& kept,
                            std::vector<CountUpdate>& updates);
  // The sequence has ended.
  void forget(uint64_t counts_id);
  // What was brought over may be lost.
  void distrust();
  size_t num_lists() const { return lists_.size(); }

 private:
  struct List {
    Buffer data;           // DrawCount [capacity]
    size_t num_known = 0;  // of KeptCounts::counted
  };

  int64_t capacity_of(const List& list) const {
    return list.data.num_bytes() / static_cast<int64_t>(sizeof(DrawCount));
  }
  void grow(List& list, int64_t num_entries);

  DeviceMemory& memory_;
  std::unordered_map<uint64_t, List> lists_;
  std::vector<Buffer> free_;
};

}  // namespace llmserve::cuda
