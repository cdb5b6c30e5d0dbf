// Memory of one GPU, and the stream that its ops run on.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "core/memory.h"
#include "kernels/device_steps.h"

namespace llmserve::cuda {

// Everything a backend does is in the order of one stream: ops, zero-filling, copies. What is
// allocated comes from a pool of its own, so that its use can be told from others'; what is
// released goes back to the device at once.
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

  PoolUse pool_use() const;
  // Lets the other visible devices read and write it, those that can: NCCL has the GPUs of one
  // process do so, and a pool allows none by itself.
  void show_to_peers();

  // Makes the device current for the calling thread: the engine's thread is not the one that made
  // the backend.
  void make_current() const;
  int device() const { return device_; }
  // Where ops go: the backend's own stream, but within run_on().
  cudaStream_t stream() const { return stream_; }
  // What `work` asks for goes to another stream, after all that was asked for before; what is asked
  // for afterwards waits for it. The calling thread's device is as before when it returns.
  void run_on(cudaStream_t stream, const std::function<void()>& work);
  // How copy_from_host() brings what is large over.
  using Upload = std::function<void(void* to, const void* from, int64_t num_bytes)>;
  void set_upload(Upload upload) { upload_ = std::move(upload); }

 private:
  const int device_;
  cudaMemPool_t pool_ = nullptr;  // of this backend alone; null where the device has none
  bool is_shown_ = false;         // to other devices
  cudaStream_t own_stream_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Upload upload_;
  cudaEvent_t handover_ = nullptr;  // the end of one stream's work, for the next to wait for
};

}  // namespace llmserve::cuda
