// Memory of one GPU, and the stream that its ops run on.
#pragma once

#include <cuda_runtime_api.h>

#include "core/memory.h"

namespace llmserve::cuda {

// Everything a backend does is in the order of one stream: ops, zero-filling, copies.
class DeviceMemory final : public Memory {
 public:
  // Throws DeviceError.
  explicit DeviceMemory(int device);
  ~DeviceMemory() override;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  bool is_host() const override { return false; }
  int64_t available_bytes() const override;
  std::byte* allocate(int64_t num_bytes) override;
  void release(std::byte* data, int64_t num_bytes) noexcept override;
  void copy_from_host(void* to, const void* from, int64_t num_bytes) override;
  void copy_to_host(void* to, const void* from, int64_t num_bytes) override;
  void synchronize() override;

  // Makes the device current for the calling thread: the engine's thread is not the one that made
  // the backend.
  void make_current() const;
  cudaStream_t stream() const { return stream_; }

 private:
  const int device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace llmserve::cuda
