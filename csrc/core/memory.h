// Where tensors live: the host's memory, or a device's. A backend says which (Backend::memory).
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmserve {

class Memory {
 public:
  virtual ~Memory() = default;

  // Whether the processor reads and writes it through pointers. What is not the host's may only go
  // to the ops of its backend and to the copies below.
  virtual bool is_host() const = 0;
  // What can still be allocated, in bytes.
  virtual int64_t available_bytes() const = 0;

  // Zero-filled, aligned to 256 bytes at least; null for 0 bytes. Throws ResourceExhausted.
  virtual std::byte* allocate(int64_t num_bytes) = 0;
  virtual void release(std::byte* data, int64_t num_bytes) noexcept = 0;
  // A hint: [data, data + num_bytes) of what was allocated is used from its beginning on, and at
  // first hardly any of it: a first touch should not cost more than it needs.
  virtual void begin_small(std::byte* /*data*/, int64_t /*num_bytes*/) noexcept {}
  // Has the system give [data, data + num_bytes) of what was allocated now, instead of when it is
  // first written to; false where it does not.
  virtual bool touch(std::byte* /*data*/, int64_t /*num_bytes*/) noexcept { return false; }

  // Copies from host memory to this one and back, after all ops asked for so far and complete on
  // return. Throw DeviceError.
  virtual void copy_from_host(void* to, const void* from, int64_t num_bytes) = 0;
  virtual void copy_to_host(void* to, const void* from, int64_t num_bytes) = 0;

  // Waits for all ops asked for so far. Throws DeviceError if one of them failed.
  virtual void synchronize() = 0;
};

// Anonymous pages, given back to the system on release. Touched lazily, so that a large pool costs
// nothing until used.
Memory& host_memory();

// What this process has allocated of it. Until a page is touched the system counts it as free, so
// that available_bytes() takes untouched_bytes off.
struct HostAllocations {
  int64_t num_bytes = 0;
  int64_t untouched_bytes = 0;
};
HostAllocations host_allocations();

}  // namespace llmserve
