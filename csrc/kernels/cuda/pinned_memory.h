// Host memory that the GPU copies from and to by itself, and reads through pointers.
#pragma once

#include <cuda_runtime_api.h>

#include "core/memory.h"

namespace llmserve::cuda {

// Page-locked, so that copies to and from the device run beside the processor, at link speed; and
// mapped: the processor's pointers hold on the device too. What is released may not be in use by
// the device; release() waits for it.
class PinnedMemory final : public Memory {
 public:
  explicit PinnedMemory(int device) : device_(device) {}

  bool is_host() const override { return true; }
  int64_t available_bytes() const override { return host_memory().available_bytes(); }
  std::byte* allocate(int64_t num_bytes) override;
  void release(std::byte* data, int64_t num_bytes) noexcept override;
  void copy_from_host(void* to, const void* from, int64_t num_bytes) override;
  void copy_to_host(void* to, const void* from, int64_t num_bytes) override;
  void synchronize() override {}

 private:
  const int device_;
};

}  // namespace llmserve::cuda
