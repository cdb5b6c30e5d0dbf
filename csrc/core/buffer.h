// Owned memory of the host or a device, given back the moment the owner goes (so that close() is
// visible from outside).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/memory.h"

namespace llmserve {

// Zero-filled. The memory that it came from must outlive it: a backend is declared before what it
// holds.
class Buffer {
 public:
  Buffer() = default;
  // Throws ResourceExhausted if the memory refuses.
  explicit Buffer(int64_t num_bytes, Memory& memory = host_memory())
      : memory_(&memory), data_(memory.allocate(num_bytes)), num_bytes_(num_bytes) {}
  ~Buffer() {
    if (data_) memory_->release(data_, num_bytes_);
  }
  Buffer(Buffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  Memory* memory_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace llmserve
