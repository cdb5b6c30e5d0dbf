// Host memory between pages that nobody may touch: an op that reads or writes past an operand ends
// the process there and then.
#pragma once

#include "core/memory.h"

namespace llmserve {

class GuardedMemory final : public Memory {
 public:
  // Where an allocation lies in its pages, and so which of its ends is watched to the byte.
  enum class Side { kBegin, kEnd };
  explicit GuardedMemory(Side side) : side_(side) {}

  bool is_host() const override { return true; }
  int64_t available_bytes() const override { return host_memory().available_bytes(); }
  // Aligned to the size of an element alone: operands may lie anywhere.
  std::byte* allocate(int64_t num_bytes) override;
  void release(std::byte* data, int64_t num_bytes) noexcept override;
  void copy_from_host(void* to, const void* from, int64_t num_bytes) override;
  void copy_to_host(void* to, const void* from, int64_t num_bytes) override;
  void synchronize() override {}

 private:
  const Side side_;
};

}  // namespace llmserve
