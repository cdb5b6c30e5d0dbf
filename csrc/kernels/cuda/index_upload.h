// Brings an op's host integers (ids, slots, tables) to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_memory.h"

namespace llmserve::cuda {

// A step's integers and their twin on the device (kernels/device_steps.h); none outside a step.
struct StepBlock {
  const std::byte* host = nullptr;
  const std::byte* device = nullptr;
  int64_t num_bytes = 0;
  // What is asked for will be launched again, for other numbers in the same arrays.
  bool is_recorded = false;
  bool is_captured = false;  // at this moment
  int64_t num_moves = 0;     // of memory that recorded work uses

  // Memory that ops were given is about to move.
  void move() {
    if (is_captured) throw NotSupported("memory moves while a step is captured");
    ++num_moves;
  }
  bool holds(const void* data) const {
    const auto* byte = static_cast<const std::byte*>(data);
    return std::less_equal<>()(host, byte) && std::less<>()(byte, host + num_bytes);
  }
  // Of an array that it holds.
  template <class T>
  const T* on_device(const T* data) const {
    return reinterpret_cast<const T*>(device + (reinterpret_cast<const std::byte*>(data) - host));
  }
};

// One array on the device and what it holds. Every layer of a step passes the same slots and block
// tables: they are compared with what is there already, which is some thousand times cheaper than
// a copy, and only copied if they differ.
class IndexUpload {
 public:
  IndexUpload(DeviceMemory& memory, StepBlock& block) : memory_(memory), block_(block) {}

  // Whether these very values are on the device.
  template <class T>
  bool has(std::span<const T> values) const {
    return values.size_bytes() == held_.size() &&
           std::memcmp(held_.data(), values.data(), values.size_bytes()) == 0;
  }
  // The array on the device, valid for the ops that are asked for before the next call. The copy is
  // in the stream's order, after the ops that read what was there. Its source is ordinary memory,
  // which the runtime takes over before it returns: there is nothing that a later call could
  // overwrite too early. What a step's block holds is there already.
  template <class T>
  const T* operator()(std::span<const T> values) {
    if (block_.holds(values.data())) return block_.on_device(values.data());
    return static_cast<const T*>(upload(values.data(), static_cast<int64_t>(values.size_bytes())));
  }

 private:
  const void* upload(const void* values, int64_t num_bytes) {
    if (num_bytes == 0) return nullptr;
    const auto size = static_cast<size_t>(num_bytes);
    if (size == held_.size() && std::memcmp(held_.data(), values, size) == 0) return buffer_.data();
    if (block_.is_captured) throw NotSupported("indices change while a step is captured");
    if (buffer_.num_bytes() < num_bytes) {
      block_.move();
      buffer_ = Buffer();  // first, so that both need not fit
      buffer_ = Buffer(2 * num_bytes, memory_);
    }
    held_.clear();  // holds nothing if the copy fails
    check("cudaMemcpyAsync of indices",
          cudaMemcpyAsync(buffer_.data(), values, size, cudaMemcpyHostToDevice, memory_.stream()));
    const auto* bytes = static_cast<const std::byte*>(values);
    held_.assign(bytes, bytes + size);
    return buffer_.data();
  }

  DeviceMemory& memory_;
  StepBlock& block_;
  Buffer buffer_;
  std::vector<std::byte> held_;  // what the first bytes of buffer_ are
};

}  // namespace llmserve::cuda
