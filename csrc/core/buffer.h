// Owned host memory, given back to the system the moment the owner goes (so that close() is visible
// from outside).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmserve {

// Page-aligned, zero-filled anonymous memory; pages are touched lazily, so that a large pool costs
// nothing until used.
class Buffer {
 public:
  Buffer() = default;
  // Throws ResourceExhausted if the system refuses.
  explicit Buffer(int64_t num_bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace llmserve
